// The kernels that exist once for every kind of codes, as what cudaLaunchKernelExC takes. `plain`
// ones are for one group in a tile and nothing beside scales.
#pragma once

#include "backends/cuda/tile_layout.h"

namespace marlin::cuda {

/// Parameters of the kernel: GemvArguments.
template <CodeKind kKind>
const void* GemvFunction(bool bf16, bool plain);

/// Parameters of the kernel: CUtensorMap, WgmmaArguments.
template <CodeKind kKind>
const void* WgmmaFunction(bool bf16, int tokens, bool plain);

#define MARLIN_KIND(kind)                                          \
  template <>                                                      \
  const void* GemvFunction<CodeKind::kind>(bool bf16, bool plain); \
  template <>                                                      \
  const void* WgmmaFunction<CodeKind::kind>(bool bf16, int tokens, bool plain);
#include "backends/cuda/code_kinds.def"
#undef MARLIN_KIND

}  // namespace marlin::cuda
