// Logits as integers of the same order.
#pragma once

#include <cstdint>

#include "backends/cuda/common/fragment_math.cuh"

namespace marlin::cuda {

/// Keys ascend with the logit; 0 and -0 have the same.
MARLIN_DEVICE uint32_t KeyOf(float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
MARLIN_DEVICE float LogitOf(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

/// A token with its logit: the largest is the most likely one, ties by the lower id. Not 0.
MARLIN_DEVICE unsigned long long TokenKey(float logit, int id) {
  return static_cast<unsigned long long>(KeyOf(logit)) << 32 | static_cast<uint32_t>(~id);
}
MARLIN_DEVICE float LogitOfToken(unsigned long long key) {
  return LogitOf(static_cast<uint32_t>(key >> 32));
}
MARLIN_DEVICE int IdOfToken(unsigned long long key) {
  return static_cast<int>(~static_cast<uint32_t>(key));
}

}  // namespace marlin::cuda
