// Entry points of the WGMMA kernels for cudaLaunchKernelExC, one for each kind of codes.
#pragma once

#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// Parameters of the kernel: CUtensorMap, WgmmaArguments.
template <CodeKind kKind>
const void* WgmmaFunction(bool bf16, int tokens, ParameterUse use);

#define MARLIN_KIND(kind) \
  template <>             \
  const void* WgmmaFunction<CodeKind::kind>(bool bf16, int tokens, ParameterUse use);
#include "backends/cuda/layout/code_kinds.def"
#undef MARLIN_KIND

/// The same for sparse tiles (layout/sparse_layout.h); `use` is not kAll.
template <CodeKind kKind>
const void* SparseWgmmaFunction(bool bf16, int tokens, ParameterUse use);

#define MARLIN_KIND(kind) \
  template <>             \
  const void* SparseWgmmaFunction<CodeKind::kind>(bool bf16, int tokens, ParameterUse use);
#include "backends/cuda/layout/sparse_kinds.def"
#undef MARLIN_KIND

}  // namespace marlin::cuda
