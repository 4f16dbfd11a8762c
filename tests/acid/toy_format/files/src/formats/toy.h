// A toy format: zero, or a sign and a power of two: 0 1 2 4 8 16 32 64 and their negatives.
#ifndef MARLIN_FORMATS_TOY_H_
#define MARLIN_FORMATS_TOY_H_

#include "formats/codec.h"

namespace marlin {
namespace formats {

struct Toy {
  enum { kBits = 4, kZero = MARLIN_ZERO_NONE, kHasCodebook = 0, kQuantized = 1 };

  MARLIN_CODEC float Value(marlin_code code) {
    const marlin_code exponent = code & 7u;
    const float magnitude = exponent == 0u ? 0.0f : static_cast<float>(1u << (exponent - 1u));
    return (code & 8u) != 0u ? -magnitude : magnitude;
  }

  MARLIN_CODEC marlin_code Encode(float x) {
    const float magnitude = x < 0.0f ? -x : x;
    marlin_code code = 0u;
    // Rounds up past the midpoint of two neighbours, or at it when the upper one's code is even.
    for (marlin_code upper = 1u; upper < 8u; ++upper) {
      const float midpoint = 0.5f * (Value(upper - 1u) + Value(upper));
      if (magnitude > midpoint || (magnitude == midpoint && (upper & 1u) == 0u)) code = upper;
    }
    return x < 0.0f && code != 0u ? code | 8u : code;
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_TOY_H_
