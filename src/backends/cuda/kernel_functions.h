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

/// Parameters of the kernel: CUtensorMap, Fp8Arguments. For the kinds of fp8_kinds.def.
template <CodeKind kKind>
const void* Fp8Function(int tokens, bool one_group);

#define MARLIN_FP8_KIND(kind) \
  template <>                 \
  const void* Fp8Function<CodeKind::kind>(int tokens, bool one_group);
#include "backends/cuda/fp8_kinds.def"
#undef MARLIN_FP8_KIND

#define MARLIN_KIND(kind)                                                \
  template <>                                                            \
  const void* GemvFunction<CodeKind::kind>(bool bf16, ParameterUse use); \
  template <>                                                            \
  const void* WgmmaFunction<CodeKind::kind>(bool bf16, int tokens, ParameterUse use);
#include "backends/cuda/code_kinds.def"
#undef MARLIN_KIND

}  // namespace marlin::cuda
