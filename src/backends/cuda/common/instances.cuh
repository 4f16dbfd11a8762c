// Template arguments of the instances (plan/instances.def) from their variants.
#pragma once

#include "backends/cuda/common/fragment_math.cuh"
#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// call.operator()<T, kUse>(): T is Bf16x2 or F16x2. Instantiated only for the parameters that
/// weights of the kind have: unquantized ones have none, sparse ones neither zeros nor biases.
template <typename Tiles, typename Call>
const void* WithOperands(bool bf16, ParameterUse use, const Call& call) {
  const auto with_type = [&]<typename T>() -> const void* {
    if constexpr (Tiles::kCodes != CodeKind::kDense16) {
      if (use == ParameterUse::kScales) {
        return call.template operator()<T, ParameterUse::kScales>();
      }
      if constexpr (!Tiles::kSparse) {
        if (use == ParameterUse::kAll) return call.template operator()<T, ParameterUse::kAll>();
      }
    }
    return call.template operator()<T, ParameterUse::kOneScale>();
  };
  return bf16 ? with_type.template operator()<Bf16x2>() : with_type.template operator()<F16x2>();
}

}  // namespace marlin::cuda
