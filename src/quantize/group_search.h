// One group of weights: its extremes, and the choice of its scale and zero point.
#pragma once

#include <cstdint>

#include "marlin/quantize.h"
#include "quantize/encoder.h"
#include "quantize/scales.h"

namespace marlin {

/// Bits of the largest |w|; at or above those of infinity when any weight is NaN or Inf.
uint32_t MaxMagnitudeBits(const float* w, int64_t count);

/// Extremes of finite weights; low and high only when `affine`.
GroupRange RangeOf(const float* w, int64_t count, bool affine);

/// What every group of a matrix shares.
struct GroupContext {
  const Encoder& encoder;
  ScaleRule rule;
  ScaleCoder coder;
  bool affine;
};

/// Starting from round-to-nearest's parameters, searches those with the smallest squared error.
///
/// Grid: the wanted scale is that of round-to-nearest times r in {1, 0.98, ..., 0.44}
/// and 1.04, 1.08 (a coarser scale can hit an asymmetric table better); for affine formats the ends
/// of the range shrink by r together with their ratio kept, and by r on one side only. E8M0 tries
/// the exponents -1, 0 and +1. Candidates that round to the same stored scale and zero are tried
/// once; the first of equals wins. `codes` is scratch of `count` bytes.
GroupParameters SearchMse(const GroupContext& context, const GroupRange& range, const float* w,
                          int64_t count, uint8_t* codes);

}  // namespace marlin
