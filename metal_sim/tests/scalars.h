// Half and bfloat of the host, for the values that tests expect.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace metal_sim {

inline uint16_t FloatToHalf(float value) {
  return std::bit_cast<uint16_t>(static_cast<_Float16>(value));
}
inline float HalfToFloat(uint16_t bits) {
  return static_cast<float>(std::bit_cast<_Float16>(bits));
}

/// Rounds to nearest, ties to even; a NaN stays one.
inline uint16_t FloatToBf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float Bf16ToFloat(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

}  // namespace metal_sim
