// NF2: 4 normal quantiles by QLoRA's construction with the k-dependent offset 0.8541667.
#ifndef MARLIN_FORMATS_NF2_H_
#define MARLIN_FORMATS_NF2_H_

#include "formats/codebook.h"
#include "formats/codec.h"

namespace marlin {
namespace formats {

MARLIN_TABLE(kNf2Values, 4, -1.0f, 0.0f, 0.43581817f, 1.0f);

struct Nf2 {
  enum { kBits = 2, kZero = MARLIN_ZERO_NONE, kHasCodebook = 1, kQuantized = 1 };

  MARLIN_CODEC float Value(marlin_code code) {
    return marlin_codebook_value(MARLIN_TABLE_OF(kNf2Values), code & 3u);
  }

  MARLIN_CODEC marlin_code Encode(float x) {
    return marlin_codebook_encode(MARLIN_TABLE_OF(kNf2Values), 4, x);
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_NF2_H_
