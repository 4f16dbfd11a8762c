// Unsigned 5-bit integers 0..31, with a zero point or a bias per group.
#ifndef MARLIN_FORMATS_U5_H_
#define MARLIN_FORMATS_U5_H_

#include "formats/codec.h"

namespace marlin {
namespace formats {

struct U5 {
  enum { kBits = 5, kZero = MARLIN_ZERO_REQUIRED, kHasCodebook = 0, kQuantized = 1 };

  MARLIN_CODEC float Value(marlin_code code) { return static_cast<float>(code & 31u); }

  MARLIN_CODEC marlin_code Encode(float x) {
    return static_cast<marlin_code>(marlin_round_to_int(x, 0, 31));
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_U5_H_
