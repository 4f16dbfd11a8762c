// Signed 4-bit integers -8..7, stored as value + 8 (offset binary).
#ifndef MARLIN_FORMATS_S4_H_
#define MARLIN_FORMATS_S4_H_

#include "formats/codec.h"

namespace marlin {
namespace formats {

struct S4 {
  enum { kBits = 4, kZero = MARLIN_ZERO_NONE, kHasCodebook = 0, kQuantized = 1 };

  MARLIN_CODEC float Value(marlin_code code) {
    return static_cast<float>(static_cast<int>(code & 15u) - 8);
  }

  MARLIN_CODEC marlin_code Encode(float x) {
    return static_cast<marlin_code>(marlin_round_to_int(x, -8, 7) + 8);
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_S4_H_
