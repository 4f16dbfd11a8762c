// Selects a function by the code kind of sparse tiles.
#pragma once

#include <type_traits>

#include "backends/cuda/layout/code_kind.h"

namespace marlin::cuda {

/// call(kind) with the kind as a constant, std::integral_constant. Null for a kind that sparse
/// tiles do not have or whose kernels are not built.
template <typename Call>
const void* OfSparseKind(CodeKind kind, const Call& call) {
  switch (kind) {
#define MARLIN_KIND(name)                                              \
  case CodeKind::name:                                                 \
    if constexpr (IsBuilt(CodeKind::name)) {                           \
      return call(std::integral_constant<CodeKind, CodeKind::name>()); \
    }                                                                  \
    break;
#include "backends/cuda/layout/sparse_kinds.def"
#undef MARLIN_KIND
    default:
      break;
  }
  return nullptr;
}

}  // namespace marlin::cuda
