// Entry points of the FP8 kernels for cudaLaunchKernelExC, one for each kind of codes in
// fp8_kinds.def.
#pragma once

#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// Parameters of the kernel: CUtensorMap, Fp8Arguments.
template <CodeKind kKind>
const void* Fp8Function(int tokens, bool one_group);

#define MARLIN_FP8_KIND(kind) \
  template <>                 \
  const void* Fp8Function<CodeKind::kind>(int tokens, bool one_group);
#include "backends/cuda/gemm/fp8/fp8_kinds.def"
#undef MARLIN_FP8_KIND

}  // namespace marlin::cuda
