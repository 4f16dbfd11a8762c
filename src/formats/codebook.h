// Lookup and nearest-value search in an ascending table of values.
#ifndef MARLIN_FORMATS_CODEBOOK_H_
#define MARLIN_FORMATS_CODEBOOK_H_

#include "formats/codec.h"

namespace marlin {
namespace formats {

#if defined(__METAL_VERSION__)
#define MARLIN_TABLE_POINTER constant const float*
#else
#define MARLIN_TABLE_POINTER const float*
#endif

MARLIN_CODEC float marlin_codebook_value(MARLIN_TABLE_POINTER values, marlin_code code) {
  return values[code];
}

/// The code of the value nearest to x in an ascending table; a tie goes to the even code. Compares
/// the distances rather than a rounded midpoint: between adjacent table values both differences are
/// exact or err to the same side, so no double is needed.
MARLIN_CODEC marlin_code marlin_codebook_encode(MARLIN_TABLE_POINTER values, int count, float x) {
  marlin_code below = 0u;
  for (int i = 1; i < count; ++i) {
    if (x >= values[i]) below = static_cast<marlin_code>(i);
  }
  if (below + 1u >= static_cast<marlin_code>(count)) return below;
  const float down = x - values[below];
  const float up = values[below + 1u] - x;
  if (up < down) return below + 1u;
  return (up == down && (below & 1u) != 0u) ? below + 1u : below;
}

}  // namespace formats
}  // namespace marlin
#endif  // MARLIN_FORMATS_CODEBOOK_H_
