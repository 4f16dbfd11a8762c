// Unsigned 4-bit integers 0..15, with a zero point per group.
#ifndef MARLIN_FORMATS_U4_H_
#define MARLIN_FORMATS_U4_H_

#include "formats/codec.h"

namespace marlin {
namespace formats {

struct U4 {
  enum { kBits = 4, kZero = MARLIN_ZERO_REQUIRED, kHasCodebook = 0, kQuantized = 1 };

  MARLIN_CODEC float Value(marlin_code code) { return static_cast<float>(code & 15u); }

  MARLIN_CODEC marlin_code Encode(float x) {
    return static_cast<marlin_code>(marlin_round_to_int(x, 0, 15));
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_U4_H_
