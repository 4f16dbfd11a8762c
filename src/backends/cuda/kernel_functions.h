// The kernels that exist once for every kind of codes, as what cudaLaunchKernelExC takes.
#pragma once

#include "backends/cuda/tile_layout.h"

namespace marlin::cuda {

/// Parameters of the kernel: GemvArguments.
template <CodeKind kKind>
const void* GemvFunction(bool bf16, ParameterUse use);

/// Parameters of the kernel: CUtensorMap, WgmmaArguments.
template <CodeKind kKind>
const void* WgmmaFunction(bool bf16, int tokens, ParameterUse use);

/// Parameters of the kernel: ExactArguments<TileView>, or <CanonicalView> where not `tiled`; rows
/// as ExactRowsFor says. kDense16 not tiled: fp32 weights.
template <CodeKind kKind>
const void* ExactFunction(bool tiled, int rows);

#define MARLIN_KIND(kind)                                                             \
  template <>                                                                         \
  const void* GemvFunction<CodeKind::kind>(bool bf16, ParameterUse use);              \
  template <>                                                                         \
  const void* WgmmaFunction<CodeKind::kind>(bool bf16, int tokens, ParameterUse use); \
  template <>                                                                         \
  const void* ExactFunction<CodeKind::kind>(bool tiled, int rows);
#include "backends/cuda/code_kinds.def"
#undef MARLIN_KIND

}  // namespace marlin::cuda
