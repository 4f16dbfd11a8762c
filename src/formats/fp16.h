// IEEE fp16 as a weight format, without scales.
#ifndef MARLIN_FORMATS_FP16_H_
#define MARLIN_FORMATS_FP16_H_

#include "formats/codec.h"

namespace marlin {
namespace formats {

struct Fp16 {
  enum { kBits = 16, kZero = MARLIN_ZERO_NONE, kHasCodebook = 0, kQuantized = 0 };

  MARLIN_CODEC float Value(marlin_code code) {
    const marlin_code sign = (code & 0x8000u) << 16;
    const marlin_code magnitude = code & 0x7fffu;
    if (magnitude >= 0x7c00u) {
      return marlin_bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    }
    const float value = magnitude < 0x400u
                            ? static_cast<float>(magnitude) * marlin_bits_to_float(103u << 23)
                            : marlin_bits_to_float((magnitude << 13) + (112u << 23));
    return sign != 0u ? -value : value;
  }

  MARLIN_CODEC marlin_code Encode(float x) {
    const marlin_code bits = marlin_float_to_bits(x);
    const marlin_code sign = (bits >> 16) & 0x8000u;
    const marlin_code a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) return sign | 0x7e00u;
    if (a >= 0x477ff000u) return sign | 0x7c00u;
    if (a >= (113u << 23)) return sign | ((a + 0xfffu + ((a >> 13) & 1u) - (112u << 23)) >> 13);
    // Adding 0.5 puts the subnormal step 2^-24 at the last mantissa bit.
    return sign | (marlin_float_to_bits(marlin_bits_to_float(a) + 0.5f) & 0x7ffu);
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_FP16_H_
