// OCP FP6 E2M3: sign, two exponent bits, three mantissa bits; largest 7.5, no infinities, no NaN.
#ifndef MARLIN_FORMATS_FP6_E2M3_H_
#define MARLIN_FORMATS_FP6_E2M3_H_

#include "formats/codec.h"

namespace marlin {
namespace formats {

struct Fp6E2M3 {
  enum { kBits = 6, kZero = MARLIN_ZERO_NONE, kHasCodebook = 0, kQuantized = 1 };

  MARLIN_CODEC float Value(marlin_code code) {
    const marlin_code magnitude = code & 31u;
    // Codes below 8 are subnormal, in steps of 1/8; from 8 on the fields are as in an fp32.
    const float value = magnitude < 8u ? 0.125f * static_cast<float>(magnitude)
                                       : marlin_bits_to_float((magnitude << 20) + (126u << 23));
    return (code & 32u) != 0u ? -value : value;
  }

  /// Saturates to the largest value.
  MARLIN_CODEC marlin_code Encode(float x) {
    const marlin_code bits = marlin_float_to_bits(x);
    const marlin_code sign = (bits >> 26) & 32u;
    const marlin_code a = bits & 0x7fffffffu;
    if (a >= 0x40f00000u) return sign | 31u;
    marlin_code magnitude = 0u;
    if (a >= (127u << 23)) {
      magnitude = (a + 0x7ffffu + ((a >> 20) & 1u) - (126u << 23)) >> 20;
    } else {
      // Adding 2^20 puts the subnormal step at the last mantissa bit, so the sum rounds to it.
      const float magic = marlin_bits_to_float(147u << 23);
      magnitude = marlin_float_to_bits(marlin_bits_to_float(a) + magic) & 0xfu;
    }
    return magnitude == 0u ? 0u : (sign | magnitude);
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_FP6_E2M3_H_
