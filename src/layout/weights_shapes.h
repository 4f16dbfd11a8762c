// The type and shape of every array that a WeightsSpec asks for.
#pragma once

#include <cstdint>

#include "marlin/tensor.h"
#include "marlin/weights.h"

namespace marlin {

/// Views without data; an array that the spec lacks has zero elements.
struct WeightsShapes {
  TensorView codes;
  TensorView scales;
  TensorView zeros;
  TensorView biases;
  TensorView global_scale;
};

/// Precondition: CheckSpec(spec).ok().
WeightsShapes ShapesOf(const WeightsSpec& spec);

/// Index of the first element of contiguous numbers that is NaN or Inf; -1 when all are finite.
int64_t FindNonFinite(const TensorView& view);

}  // namespace marlin
