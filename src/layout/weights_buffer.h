// Checks of a WeightsSpec and the allocation of quantized weights that are still to be filled.
#pragma once

#include <cstdint>

#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin {

/// Scales must cover multiples of this many k, unless one group covers all: kernels take 16 k of a
/// column under one scale.
inline constexpr int64_t kGroupGranule = 16;

/// The group size that a spec stores for a requested one: k itself when one group covers all k (0
/// asks for that), kGroupGranule when k is 0. Errors: kInvalidArgument unless the size is 0, a
/// positive multiple of 16, or at least k.
Result<int64_t> NormalizeGroupSize(int64_t group_size, int64_t k);

/// Checks that a spec describes weights that can exist: known format and scale type, no negative or
/// overflowing size, a legal group size, zeros and biases only where the format has them.
/// Errors: kInvalidArgument naming the field.
Status CheckSpec(const WeightsSpec& spec);

/// Weights with uninitialised contents, and the pointers to fill them through before they are
/// handed out. All arrays lie in one block that weights.owner keeps alive.
struct WeightsBuffer {
  QuantizedWeights weights;
  void* codes = nullptr;
  void* scales = nullptr;
  uint16_t* zeros = nullptr;
  void* biases = nullptr;
  float* global_scale = nullptr;
};

/// Errors: those of CheckSpec, kOutOfMemory.
Result<WeightsBuffer> AllocateWeights(const WeightsSpec& spec);

}  // namespace marlin
