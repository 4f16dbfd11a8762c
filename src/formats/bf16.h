// bf16 as a weight format: the upper half of an fp32, without scales.
#ifndef MARLIN_FORMATS_BF16_H_
#define MARLIN_FORMATS_BF16_H_

#include "formats/codec.h"

namespace marlin {
namespace formats {

struct Bf16 {
  enum { kBits = 16, kZero = MARLIN_ZERO_NONE, kHasCodebook = 0, kQuantized = 0 };

  MARLIN_CODEC float Value(marlin_code code) { return marlin_bits_to_float(code << 16); }

  MARLIN_CODEC marlin_code Encode(float x) {
    const marlin_code bits = marlin_float_to_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_BF16_H_
