// Unsigned 6-bit integers 0..63, with a zero point or a bias per group.
#ifndef MARLIN_FORMATS_U6_H_
#define MARLIN_FORMATS_U6_H_

#include "formats/codec.h"

namespace marlin {
namespace formats {

struct U6 {
  enum { kBits = 6, kZero = MARLIN_ZERO_REQUIRED, kHasCodebook = 0, kQuantized = 1 };

  MARLIN_CODEC float Value(marlin_code code) { return static_cast<float>(code & 63u); }

  MARLIN_CODEC marlin_code Encode(float x) {
    return static_cast<marlin_code>(marlin_round_to_int(x, 0, 63));
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_U6_H_
