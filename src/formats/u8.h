// Unsigned 8-bit integers 0..255, with a zero point or a bias per group.
#ifndef MARLIN_FORMATS_U8_H_
#define MARLIN_FORMATS_U8_H_

#include "formats/codec.h"

namespace marlin {
namespace formats {

struct U8 {
  enum { kBits = 8, kZero = MARLIN_ZERO_REQUIRED, kHasCodebook = 0, kQuantized = 1 };

  MARLIN_CODEC float Value(marlin_code code) { return static_cast<float>(code & 255u); }

  MARLIN_CODEC marlin_code Encode(float x) {
    return static_cast<marlin_code>(marlin_round_to_int(x, 0, 255));
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_U8_H_
