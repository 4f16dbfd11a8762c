// OCP FP8 E5M2: largest finite 57344, IEEE infinities and NaN, which are not weights.
#ifndef MARLIN_FORMATS_FP8_E5M2_H_
#define MARLIN_FORMATS_FP8_E5M2_H_

#include "formats/codec.h"

namespace marlin {
namespace formats {

struct Fp8E5M2 {
  enum { kBits = 8, kZero = MARLIN_ZERO_NONE, kHasCodebook = 0, kQuantized = 1 };

  MARLIN_CODEC float Value(marlin_code code) {
    const marlin_code magnitude = code & 127u;
    if (magnitude > 124u) return marlin_bits_to_float(0x7fc00000u);
    if (magnitude == 124u)
      return (code & 128u) != 0u ? marlin_bits_to_float(0xff800000u)
                                 : marlin_bits_to_float(0x7f800000u);
    const float unit = marlin_bits_to_float(111u << 23);  // 2^-16, the subnormal step
    const float value = magnitude < 4u ? static_cast<float>(magnitude) * unit
                                       : marlin_bits_to_float((magnitude << 21) + (112u << 23));
    return (code & 128u) != 0u ? -value : value;
  }

  /// Saturates to the largest finite value; NaN gives the code of NaN.
  MARLIN_CODEC marlin_code Encode(float x) {
    const marlin_code bits = marlin_float_to_bits(x);
    const marlin_code sign = (bits >> 24) & 128u;
    const marlin_code a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) return 127u;
    if (a >= 0x47600000u) return sign | 0x7bu;
    marlin_code magnitude = 0u;
    if (a >= (113u << 23)) {
      magnitude = (a + 0xfffffu + ((a >> 21) & 1u) - (112u << 23)) >> 21;
    } else {
      // Adding 2^7 puts the subnormal step at the last mantissa bit, so the sum rounds to it.
      const float magic = marlin_bits_to_float(134u << 23);
      magnitude = marlin_float_to_bits(marlin_bits_to_float(a) + magic) & 0x7u;
    }
    return magnitude == 0u ? 0u : (sign | magnitude);
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_FP8_E5M2_H_
