// Checks a WeightsSpec and allocates quantized weights for the caller to fill.
#pragma once

#include <cstdint>

#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin {

/// Group sizes are multiples of this, unless one group covers all of k: kernels take 16 k of a
/// column under one scale.
inline constexpr int64_t kGroupGranule = 16;

/// The group size stored for a requested one: k itself when one group covers all of k (requested as
/// 0), kGroupGranule when k is 0. Errors: kInvalidArgument unless the size is 0, a positive
/// multiple of 16, or at least k.
Result<int64_t> NormalizeGroupSize(int64_t group_size, int64_t k);

/// Checks that a spec describes possible weights: known format and scale type, no negative or
/// overflowing size, a legal group size, zeros and biases only where the format has them. Errors:
/// kInvalidArgument naming the field.
Status CheckSpec(const WeightsSpec& spec);

/// Checks that weights of a spec may have the two levels of scales that it asks for, if any.
/// Errors: kInvalidArgument.
Status CheckSuperGroups(const WeightsSpec& spec);

/// Weights with uninitialised contents, and mutable pointers through which to fill them. All arrays
/// share one block, which weights.owner keeps alive.
struct WeightsBuffer {
  QuantizedWeights weights;
  void* codes = nullptr;
  void* scales = nullptr;
  void* zeros = nullptr;
  void* biases = nullptr;
  float* global_scale = nullptr;
  void* metadata = nullptr;
  int32_t* permutation = nullptr;
  float* input_scale = nullptr;
  void* super_scales = nullptr;
  void* super_biases = nullptr;
};

/// Errors: as CheckSpec, kOutOfMemory.
Result<WeightsBuffer> AllocateWeights(const WeightsSpec& spec);

}  // namespace marlin
