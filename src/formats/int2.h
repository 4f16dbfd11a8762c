// 2-bit integers -2..1, stored as value + 2 (offset binary), with an optional zero point.
#ifndef MARLIN_FORMATS_INT2_H_
#define MARLIN_FORMATS_INT2_H_

#include "formats/codec.h"

namespace marlin {
namespace formats {

struct Int2 {
  enum { kBits = 2, kZero = MARLIN_ZERO_OPTIONAL, kHasCodebook = 0, kQuantized = 1 };

  MARLIN_CODEC float Value(marlin_code code) {
    return static_cast<float>(static_cast<int>(code & 3u) - 2);
  }

  MARLIN_CODEC marlin_code Encode(float x) {
    return static_cast<marlin_code>(marlin_round_to_int(x, -2, 1) + 2);
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_INT2_H_
