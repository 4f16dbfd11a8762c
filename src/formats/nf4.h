// NF4: the 16 normal quantiles of QLoRA, as bitsandbytes stores them.
#ifndef MARLIN_FORMATS_NF4_H_
#define MARLIN_FORMATS_NF4_H_

#include "formats/codebook.h"
#include "formats/codec.h"

namespace marlin {
namespace formats {

MARLIN_TABLE(kNf4Values, 16, -1.0f, -0.6961928009986877f, -0.5250730514526367f,
             -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
             -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
             0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
             0.7229568362236023f, 1.0f);

struct Nf4 {
  enum { kBits = 4, kZero = MARLIN_ZERO_NONE, kHasCodebook = 1, kQuantized = 1 };

  MARLIN_CODEC float Value(marlin_code code) {
    return marlin_codebook_value(MARLIN_TABLE_OF(kNf4Values), code & 15u);
  }

  MARLIN_CODEC marlin_code Encode(float x) {
    return marlin_codebook_encode(MARLIN_TABLE_OF(kNf4Values), 16, x);
  }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_NF4_H_
