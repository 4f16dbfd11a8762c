// Entry points of the GEMV kernels for cudaLaunchKernelExC, one for each kind of codes.
#pragma once

#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// The template arguments beside the kind of codes and the type of the operands.
struct GemvVariant {
  ParameterUse use;
  int strips;  ///< n-tiles per unit: 2 only for codes of up to 4 bits, one scale and one n8 tile.
  int octets;  ///< n8 tiles of tokens: 1 or 2.
};

/// Parameters of the kernel: GemvArguments.
template <CodeKind kKind>
const void* GemvFunction(bool bf16, const GemvVariant& variant);

#define MARLIN_KIND(kind) \
  template <>             \
  const void* GemvFunction<CodeKind::kind>(bool bf16, const GemvVariant& variant);
#include "backends/cuda/layout/code_kinds.def"
#undef MARLIN_KIND

/// The same for sparse tiles (layout/sparse_layout.h); variant.use is not kAll.
template <CodeKind kKind>
const void* SparseGemvFunction(bool bf16, const GemvVariant& variant);

#define MARLIN_KIND(kind) \
  template <>             \
  const void* SparseGemvFunction<CodeKind::kind>(bool bf16, const GemvVariant& variant);
#include "backends/cuda/layout/sparse_kinds.def"
#undef MARLIN_KIND

}  // namespace marlin::cuda
