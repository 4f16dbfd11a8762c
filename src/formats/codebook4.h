// A 4-bit codebook that the file supplies; the built-in table is IQ4_NL.
#ifndef MARLIN_FORMATS_CODEBOOK4_H_
#define MARLIN_FORMATS_CODEBOOK4_H_

#include "formats/codebook.h"
#include "formats/codec.h"

namespace marlin {
namespace formats {

MARLIN_TABLE(kCodebook4Values, 16, -127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f, -22.0f, -10.0f,
             1.0f, 13.0f, 25.0f, 38.0f, 53.0f, 69.0f, 89.0f, 113.0f);

struct Codebook4 {
  enum { kBits = 4, kZero = MARLIN_ZERO_NONE, kHasCodebook = 1, kQuantized = 1 };

  MARLIN_CODEC float Value(marlin_code code) {
    return marlin_codebook_value(MARLIN_TABLE_OF(kCodebook4Values), code & 15u);
  }

  MARLIN_CODEC marlin_code Encode(float x) {
    return marlin_codebook_encode(MARLIN_TABLE_OF(kCodebook4Values), 16, x);
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_CODEBOOK4_H_
