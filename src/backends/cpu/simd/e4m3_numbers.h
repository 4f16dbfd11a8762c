// The numbers of e4m3 codes as bf16, which holds all of them, for look-ups.
#pragma once

#include <bit>
#include <cstdint>

namespace marlin::cpu {

/// The 128 codes without sign; the last is NaN.
struct E4M3Numbers {
  alignas(64) uint16_t bf16[128];
  alignas(64) uint8_t high[128];  ///< Their bytes.
  alignas(64) uint8_t low[128];

  constexpr E4M3Numbers() : bf16(), high(), low() {
    for (int code = 0; code < 128; ++code) {
      const int exponent = code >> 3;
      float unit = 0x1p-9F;  // The step of subnormal and of the first normal numbers.
      for (int i = 1; i < exponent; ++i) unit *= 2.0F;
      const float value = static_cast<float>(code % 8 + (exponent > 0 ? 8 : 0)) * unit;
      bf16[code] = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
    }
    bf16[127] = 0x7fc0;
    for (int code = 0; code < 128; ++code) {
      high[code] = static_cast<uint8_t>(bf16[code] >> 8);
      low[code] = static_cast<uint8_t>(bf16[code] & 0xff);
    }
  }
};
inline constexpr E4M3Numbers kE4M3Numbers;

}  // namespace marlin::cpu
