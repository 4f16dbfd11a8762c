// FP4 E2M1: sign, two exponent bits, one mantissa bit: 0 .5 1 1.5 2 3 4 6 and negatives.
#ifndef MARLIN_FORMATS_FP4_E2M1_H_
#define MARLIN_FORMATS_FP4_E2M1_H_

#include "formats/codec.h"

namespace marlin {
namespace formats {

struct Fp4E2M1 {
  enum { kBits = 4, kZero = MARLIN_ZERO_NONE, kHasCodebook = 0, kQuantized = 1 };

  MARLIN_CODEC float Value(marlin_code code) {
    const marlin_code magnitude = code & 7u;
    // Codes 0 and 1 are subnormal (0 and 0.5); from 2 on the fields are as in an fp32.
    const float value = magnitude < 2u ? 0.5f * static_cast<float>(magnitude)
                                       : marlin_bits_to_float((magnitude << 22) + (126u << 23));
    return (code & 8u) != 0u ? -value : value;
  }

  MARLIN_CODEC marlin_code Encode(float x) {
    const float a = x < 0.0f ? -x : x;
    // Midpoints of 0 .5 1 1.5 2 3 4 6; a tie goes to the even code, so it counts as passed when
    // the code above is even.
    const marlin_code magnitude = (a > 0.25f ? 1u : 0u) + (a >= 0.75f ? 1u : 0u) +
                                  (a > 1.25f ? 1u : 0u) + (a >= 1.75f ? 1u : 0u) +
                                  (a > 2.5f ? 1u : 0u) + (a >= 3.5f ? 1u : 0u) +
                                  (a > 5.0f ? 1u : 0u);
    return (x < 0.0f && magnitude != 0u) ? (magnitude | 8u) : magnitude;
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_FP4_E2M1_H_
