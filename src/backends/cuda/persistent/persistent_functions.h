// Entry points of the persistent kernel, one for each kind of codes.
#pragma once

#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// Parameters of the kernel: PersistentArguments.
template <CodeKind kKind>
const void* PersistentFunction();

#define MARLIN_KIND(kind) \
  template <>             \
  const void* PersistentFunction<CodeKind::kind>();
#include "backends/cuda/persistent/persistent_kinds.def"
#undef MARLIN_KIND

}  // namespace marlin::cuda
