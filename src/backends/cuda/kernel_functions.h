// The kernels that exist once for every kind of codes, as what cudaLaunchKernelExC takes.
#pragma once

#include "backends/cuda/tile_layout.h"

namespace marlin::cuda {

/// What a kernel for few rows is compiled for.
struct GemvVariant {
  ParameterUse use;
  int strips;  ///< Of a unit: 2 only for codes of up to 4 bits, one scale and one octet.
  int octets;  ///< Of tokens: 1 or 2.
};

/// Parameters of the kernel: GemvArguments.
template <CodeKind kKind>
const void* GemvFunction(bool bf16, const GemvVariant& variant);

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

#define MARLIN_KIND(kind)                                                          \
  template <>                                                                      \
  const void* GemvFunction<CodeKind::kind>(bool bf16, const GemvVariant& variant); \
  template <>                                                                      \
  const void* WgmmaFunction<CodeKind::kind>(bool bf16, int tokens, ParameterUse use);
#include "backends/cuda/code_kinds.def"
#undef MARLIN_KIND

}  // namespace marlin::cuda
