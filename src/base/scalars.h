// Bit-exact conversions between fp32 and the small floats: round to nearest even, NaN stays NaN.
// Portable integer arithmetic; also the oracle for the hardware conversions in the backends.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace marlin {

/// bf16: the upper half of an fp32.
inline float Bf16ToFloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}
inline uint16_t FloatToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/// A float with kExponentBits and kMantissaBits below the sign, IEEE style (all-ones exponent is
/// Inf/NaN), converted without tables.
template <int kExponentBits, int kMantissaBits>
float SmallFloatToFloat(uint32_t bits) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr uint32_t kMantissaMask = (1u << kMantissaBits) - 1u;
  constexpr uint32_t kExponentMask = (1u << kExponentBits) - 1u;
  const uint32_t sign = (bits >> (kExponentBits + kMantissaBits)) << 31;
  const uint32_t exponent = (bits >> kMantissaBits) & kExponentMask;
  const uint32_t mantissa = bits & kMantissaMask;
  if (exponent == kExponentMask) {
    return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << (23 - kMantissaBits)));
  }
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + static_cast<uint32_t>(127 - kBias)) << 23) |
                                (mantissa << (23 - kMantissaBits)));
  }
  // Subnormal: mantissa * 2^(1 - bias - mantissa bits), exact in fp32.
  const float unit =
      std::bit_cast<float>(static_cast<uint32_t>(127 + 1 - kBias - kMantissaBits) << 23);
  const float magnitude = static_cast<float>(mantissa) * unit;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
}

/// Rounds the magnitude of a finite fp32 to a float with the given fields, nearest even. Does not
/// saturate: a value beyond the largest finite one carries into the exponent field.
template <int kExponentBits, int kMantissaBits>
uint32_t RoundMagnitude(uint32_t magnitude_bits) {
  constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  constexpr int kShift = 23 - kMantissaBits;
  constexpr uint32_t kMinNormal = static_cast<uint32_t>(127 - kBias + 1) << 23;
  if (magnitude_bits >= kMinNormal) {
    const uint32_t odd = (magnitude_bits >> kShift) & 1u;
    const uint32_t rounded = magnitude_bits + ((1u << (kShift - 1)) - 1u) + odd;
    return (rounded - (static_cast<uint32_t>(127 - kBias) << 23)) >> kShift;
  }
  // Subnormal target: shift so that one ulp is the target's smallest step, then round.
  const int exponent = static_cast<int>(magnitude_bits >> 23);
  const int shift = kShift + (127 - kBias + 1) - (exponent == 0 ? 1 : exponent);
  if (shift > 25) return 0;  // Less than half a step.
  const uint32_t mantissa = (magnitude_bits & 0x7fffffu) | (exponent == 0 ? 0u : 0x800000u);
  const uint32_t kept = mantissa >> shift;
  const uint32_t rest = mantissa & ((1u << shift) - 1u);
  const uint32_t half = 1u << (shift - 1);
  return kept + ((rest > half || (rest == half && (kept & 1u) != 0)) ? 1u : 0u);
}

/// IEEE binary16.
inline float HalfToFloat(uint16_t bits) { return SmallFloatToFloat<5, 10>(bits); }
inline uint16_t FloatToHalf(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
  }
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // >= 65520
  return static_cast<uint16_t>(sign | RoundMagnitude<5, 10>(magnitude));
}

/// OCP FP8 E5M2: IEEE style, with infinities.
inline float Fp8E5M2ToFloat(uint8_t bits) { return SmallFloatToFloat<5, 2>(bits); }

/// OCP FP8 E4M3FN: no infinities; 0x7f and 0xff are NaN.
inline float Fp8E4M3ToFloat(uint8_t bits) {
  if ((bits & 0x7fu) == 0x7fu) return std::numeric_limits<float>::quiet_NaN();
  if ((bits & 0x78u) != 0x78u) return SmallFloatToFloat<4, 3>(bits);
  const float magnitude = 256.0f * (1.0f + static_cast<float>(bits & 7u) / 8.0f);
  return (bits & 0x80u) != 0 ? -magnitude : magnitude;
}
/// Rounds to the nearest E4M3, saturating at +-448; NaN gives 0x7f.
inline uint8_t FloatToFp8E4M3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  const uint32_t rounded = magnitude >= 0x43e00000u ? 0x7eu : RoundMagnitude<4, 3>(magnitude);
  return static_cast<uint8_t>(sign | (rounded > 0x7eu ? 0x7eu : rounded));
}

/// E8M0: 2^(bits - 127); 0 is 2^-127, a subnormal fp32; 255 is NaN.
inline float E8M0ToFloat(uint8_t bits) {
  if (bits == 255) return std::numeric_limits<float>::quiet_NaN();
  if (bits == 0) return std::bit_cast<float>(0x00400000u);
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 23);
}

}  // namespace marlin
