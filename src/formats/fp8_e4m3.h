// OCP FP8 E4M3FN: largest 448, no infinities, NaN 0x7f and 0xff.
#ifndef MARLIN_FORMATS_FP8_E4M3_H_
#define MARLIN_FORMATS_FP8_E4M3_H_

#include "formats/codec.h"

namespace marlin {
namespace formats {

struct Fp8E4M3 {
  enum { kBits = 8, kZero = MARLIN_ZERO_NONE, kHasCodebook = 0, kQuantized = 1 };

  MARLIN_CODEC float Value(marlin_code code) {
    const marlin_code magnitude = code & 127u;
    if (magnitude == 127u) return marlin_bits_to_float(0x7fc00000u);
    const float unit = marlin_bits_to_float(118u << 23);  // 2^-9, the subnormal step
    const float value = magnitude < 8u ? static_cast<float>(magnitude) * unit
                                       : marlin_bits_to_float((magnitude << 20) + (120u << 23));
    return (code & 128u) != 0u ? -value : value;
  }

  /// Saturates to the largest finite value; NaN gives the code of NaN.
  MARLIN_CODEC marlin_code Encode(float x) {
    const marlin_code bits = marlin_float_to_bits(x);
    const marlin_code sign = (bits >> 24) & 128u;
    const marlin_code a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) return 127u;
    if (a >= 0x43e00000u) return sign | 0x7eu;
    marlin_code magnitude = 0u;
    if (a >= (121u << 23)) {
      magnitude = (a + 0x7ffffu + ((a >> 20) & 1u) - (120u << 23)) >> 20;
    } else {
      // Adding 2^14 puts the subnormal step at the last mantissa bit, so the sum rounds to it.
      const float magic = marlin_bits_to_float(141u << 23);
      magnitude = marlin_float_to_bits(marlin_bits_to_float(a) + magic) & 0xfu;
    }
    return magnitude == 0u ? 0u : (sign | magnitude);
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_FP8_E4M3_H_
