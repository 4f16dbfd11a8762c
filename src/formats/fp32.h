// fp32 as a weight format: plain checkpoints in full precision, without scales.
#ifndef MARLIN_FORMATS_FP32_H_
#define MARLIN_FORMATS_FP32_H_

#include "formats/codec.h"

namespace marlin {
namespace formats {

struct Fp32 {
  enum { kBits = 32, kZero = MARLIN_ZERO_NONE, kHasCodebook = 0, kQuantized = 0 };

  MARLIN_CODEC float Value(marlin_code code) { return marlin_bits_to_float(code); }

  MARLIN_CODEC marlin_code Encode(float x) { return marlin_float_to_bits(x); }
};

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_FP32_H_
