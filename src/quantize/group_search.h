// Range, scale and zero point of one group of weights.
#pragma once

#include <cstdint>

#include "marlin/quantize.h"
#include "quantize/encoder.h"
#include "quantize/scales.h"

namespace marlin {

/// Bits of the largest |w|; at or above infinity's bits when any weight is NaN or Inf.
uint32_t MaxMagnitudeBits(const float* w, int64_t count);

/// Range of finite weights; low and high only when `affine`.
GroupRange RangeOf(const float* w, int64_t count, bool affine);

/// Parameters shared by all groups of a matrix.
struct GroupContext {
  const Encoder& encoder;
  ScaleRule rule;
  ScaleCoder coder;
  bool affine;
};

/// Searches for the parameters with the smallest squared error, starting from round-to-nearest's.
///
/// Grid: round-to-nearest's parameters for the group's range times r, r in {1, 1.06, 0.94, 0.88,
/// ..., 0.46}; then r +- 0.02 and +- 0.04 around the best; for affine formats then each end of the
/// range alone times 1.1, 0.9 and 0.8; for tables that mirror then negative scales, of r in {1,
/// 0.94, ..., 0.52} of the range at the far end and +- 0.02 and +- 0.04 around the best of them.
/// E8M0 tries the exponents 0, -1 and +1, E4M3 (unless affine) the 8 codes on both sides: of FP4,
/// both 4 and 6 may be the largest code. r goes above 1 because a coarser scale can fit an uneven
/// table better. Ties keep the first candidate.
GroupParameters SearchMse(const GroupContext& context, const GroupRange& range, const float* w,
                          int64_t count);

/// Searches for the parameters with the smallest error sum(importance * (w - decoded)^2), on a
/// wider and finer grid than SearchMse, for methods that have data.
///
/// Grid: round-to-nearest's parameters, then those for the range times 0.52, 0.55, ..., 1.12 (0.30,
/// 0.34, ..., 1.10 for at most 8 levels); for affine formats also the pairs of every second factor
/// for either end; for tables that mirror the same factors with negative scales. E8M0 tries the
/// exponents -2 to +1, E4M3 the 8 codes on both sides.
GroupParameters SearchWeighted(const GroupContext& context, const GroupRange& range, const float* w,
                               const float* importance, int64_t count);

}  // namespace marlin
