// The numbers of weights, for tests.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "marlin/quantize.h"

namespace marlin::testing {

/// All weights in fp32, [experts, k, n].
inline std::vector<float> Decoded(const QuantizedWeights& weights) {
  const WeightsSpec& spec = weights.spec;
  const Shape shape{spec.experts, spec.k, spec.n};
  std::vector<float> out(static_cast<size_t>(shape.ElementCount()));
  const Status status = Dequantize(weights, MutableTensorView(out.data(), DType::kF32, shape));
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

}  // namespace marlin::testing
