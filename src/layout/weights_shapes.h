// The type and shape of every array that a WeightsSpec implies.
#pragma once

#include <cstdint>

#include "marlin/tensor.h"
#include "marlin/weights.h"

namespace marlin {

/// Views without data; an array absent from the spec has zero elements.
struct WeightsShapes {
  TensorView codes;
  TensorView scales;
  TensorView zeros;
  TensorView biases;
  TensorView global_scale;
  TensorView metadata;
  TensorView permutation;
  TensorView input_scale;
  TensorView super_scales;
  TensorView super_biases;
};

/// The element type of `scales`: the scale type's own, i8 with two levels.
inline DType StoredScaleDType(const WeightsSpec& spec) {
  return spec.super_group_size > 0 ? DType::kI8 : ScaleDType(spec.scale_type);
}
/// The element type of `biases`.
inline DType StoredBiasDType(const WeightsSpec& spec) {
  return spec.super_group_size > 0 ? DType::kI8 : BiasDType(spec.scale_type);
}

/// Precondition: CheckSpec(spec).ok().
WeightsShapes ShapesOf(const WeightsSpec& spec);

/// Length of the aligned runs of k that share a scale: the largest power of two up to `most` that
/// divides the group size; `most` where one group covers all of k.
constexpr int64_t SharedScaleRun(int64_t group_size, int64_t k, int64_t most) {
  if (group_size <= 0 || group_size >= k) return most;
  const int64_t divisor = group_size & -group_size;
  return divisor < most ? divisor : most;
}

/// Index of the first element of contiguous numbers that is NaN or Inf; -1 when all are finite.
int64_t FindNonFinite(const TensorView& view);

}  // namespace marlin
