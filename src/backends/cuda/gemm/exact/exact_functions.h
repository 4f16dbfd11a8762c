// Entry points of the exact kernels for cudaLaunchKernelExC, one for each kind of codes.
#pragma once

#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// Parameters of the kernel: ExactArguments<TileView>, or <CanonicalView> where not `tiled`; `rows`
/// comes from ExactRowsFor. kDense16 stands for fp32 weights where not tiled.
template <CodeKind kKind>
const void* ExactFunction(bool tiled, int rows);

#define MARLIN_KIND(kind) \
  template <>             \
  const void* ExactFunction<CodeKind::kind>(bool tiled, int rows);
#include "backends/cuda/layout/code_kinds.def"
#undef MARLIN_KIND

}  // namespace marlin::cuda
