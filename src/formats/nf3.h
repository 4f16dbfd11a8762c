// NF3: 8 normal quantiles by QLoRA's construction with the k-dependent offset 0.9330357.
#ifndef MARLIN_FORMATS_NF3_H_
#define MARLIN_FORMATS_NF3_H_

#include "formats/codebook.h"
#include "formats/codec.h"

namespace marlin {
namespace formats {

MARLIN_TABLE(kNf3Values, 8, -1.0f, -0.53502274f, -0.24693143f, 0.0f, 0.18333748f, 0.38199395f,
             0.6229857f, 1.0f);

struct Nf3 {
  enum { kBits = 3, kZero = MARLIN_ZERO_NONE, kHasCodebook = 1, kQuantized = 1 };

  MARLIN_CODEC float Value(marlin_code code) {
    return marlin_codebook_value(MARLIN_TABLE_OF(kNf3Values), code & 7u);
  }

  MARLIN_CODEC marlin_code Encode(float x) {
    return marlin_codebook_encode(MARLIN_TABLE_OF(kNf3Values), 8, x);
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_NF3_H_
