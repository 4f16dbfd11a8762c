// Signed 8-bit integers -128..127, two's complement; other quantizers give them zero points.
#ifndef MARLIN_FORMATS_S8_H_
#define MARLIN_FORMATS_S8_H_

#include "formats/codec.h"

namespace marlin {
namespace formats {

struct S8 {
  enum { kBits = 8, kZero = MARLIN_ZERO_ACCEPTED, kHasCodebook = 0, kQuantized = 1 };

  MARLIN_CODEC float Value(marlin_code code) {
    return static_cast<float>(static_cast<int>((code & 255u) ^ 128u) - 128);
  }

  MARLIN_CODEC marlin_code Encode(float x) {
    return static_cast<marlin_code>(marlin_round_to_int(x, -128, 127)) & 255u;
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_S8_H_
