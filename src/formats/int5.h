// 5-bit integers -16..15, stored as value + 16 (offset binary), with an optional zero point.
#ifndef MARLIN_FORMATS_INT5_H_
#define MARLIN_FORMATS_INT5_H_

#include "formats/codec.h"

namespace marlin {
namespace formats {

struct Int5 {
  enum { kBits = 5, kZero = MARLIN_ZERO_ACCEPTED, kHasCodebook = 0, kQuantized = 1 };

  MARLIN_CODEC float Value(marlin_code code) {
    return static_cast<float>(static_cast<int>(code & 31u) - 16);
  }

  MARLIN_CODEC marlin_code Encode(float x) {
    return static_cast<marlin_code>(marlin_round_to_int(x, -16, 15) + 16);
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_INT5_H_
