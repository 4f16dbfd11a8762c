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

#define MARLIN_KIND(kind)                                                \
  template <>                                                            \
  const void* GemvFunction<CodeKind::kind>(bool bf16, ParameterUse use); \
  template <>                                                            \
  const void* WgmmaFunction<CodeKind::kind>(bool bf16, int tokens, ParameterUse use);
#include "backends/cuda/code_kinds.def"
#undef MARLIN_KIND

}  // namespace marlin::cuda
