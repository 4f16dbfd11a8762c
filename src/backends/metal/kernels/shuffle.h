// Shuffles of 64-bit words, which the language does not have, and sums of them.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_SHUFFLE_H_
#define MARLIN_BACKENDS_METAL_KERNELS_SHUFFLE_H_

#include "backends/metal/kernels/parameters.h"

namespace marlin {
namespace kernels {

static inline ulong ShuffleXor(ulong value, ushort mask) {
  const uint low = metal::simd_shuffle_xor(uint(value), mask);
  const uint high = metal::simd_shuffle_xor(uint(value >> 32), mask);
  return ulong(high) << 32 | low;
}

static inline ulong Shuffle(ulong value, ushort lane) {
  const uint low = metal::simd_shuffle(uint(value), lane);
  const uint high = metal::simd_shuffle(uint(value >> 32), lane);
  return ulong(high) << 32 | low;
}

/// The sum of a value over the lanes up to this one.
static inline ulong SumThrough(ulong value, ushort lane) {
  for (ushort step = 1; step < kLanes; step *= 2) {
    const ulong other = Shuffle(value, lane < step ? lane : ushort(lane - step));
    value += lane < step ? 0ul : other;
  }
  return value;
}

static inline ulong SumOfLanes(ulong value) {
  for (ushort step = kLanes / 2; step > 0; step /= 2) value += ShuffleXor(value, step);
  return value;
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_SHUFFLE_H_
