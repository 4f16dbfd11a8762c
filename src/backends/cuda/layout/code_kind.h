// Maps formats to decoders.
#pragma once

#include "backends/cuda/layout/tile_layout.h"
#include "marlin/format.h"

namespace marlin::cuda {

/// The decoder of a format.
CodeKind KindOf(Format format);

/// Whether this build has kernels for a kind (MARLIN_CUDA_KINDS of CMake).
constexpr bool IsBuilt([[maybe_unused]] CodeKind kind) {
#if defined(MARLIN_CUDA_KIND_BITS)
  return ((MARLIN_CUDA_KIND_BITS >> static_cast<int>(kind)) & 1) != 0;
#else
  return true;
#endif
}

}  // namespace marlin::cuda
