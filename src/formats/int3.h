// 3-bit integers -4..3, stored as value + 4 (offset binary), with an optional zero point.
#ifndef MARLIN_FORMATS_INT3_H_
#define MARLIN_FORMATS_INT3_H_

#include "formats/codec.h"

namespace marlin {
namespace formats {

struct Int3 {
  enum { kBits = 3, kZero = MARLIN_ZERO_OPTIONAL, kHasCodebook = 0, kQuantized = 1 };

  MARLIN_CODEC float Value(marlin_code code) {
    return static_cast<float>(static_cast<int>(code & 7u) - 4);
  }

  MARLIN_CODEC marlin_code Encode(float x) {
    return static_cast<marlin_code>(marlin_round_to_int(x, -4, 3) + 4);
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_INT3_H_
