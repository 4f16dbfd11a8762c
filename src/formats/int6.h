// 6-bit integers -32..31, stored as value + 32 (offset binary), with an optional zero point.
#ifndef MARLIN_FORMATS_INT6_H_
#define MARLIN_FORMATS_INT6_H_

#include "formats/codec.h"

namespace marlin {
namespace formats {

struct Int6 {
  enum { kBits = 6, kZero = MARLIN_ZERO_ACCEPTED, kHasCodebook = 0, kQuantized = 1 };

  MARLIN_CODEC float Value(marlin_code code) {
    return static_cast<float>(static_cast<int>(code & 63u) - 32);
  }

  MARLIN_CODEC marlin_code Encode(float x) {
    return static_cast<marlin_code>(marlin_round_to_int(x, -32, 31) + 32);
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_INT6_H_
