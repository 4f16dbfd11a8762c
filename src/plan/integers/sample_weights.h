// What a draw computes, on integers, so that it has the same tokens on every device: tokens have
// weights in proportion to their probabilities, whose sums do not depend on an order.
//
//   order    by logit, the most likely first, ties by id
//   top-k    the first k
//   top-p    the shortest start of the order with ShareOf(top_p, sum of the weights)
//   min-p    those with at least ShareOf(min_p, weight of the most likely token)
//   draw     the first token at which the sum of the weights exceeds ShareOfRandom of all
//
// Compiles as C++20 and as Metal Shading Language.
#ifndef MARLIN_PLAN_INTEGERS_SAMPLE_WEIGHTS_H_
#define MARLIN_PLAN_INTEGERS_SAMPLE_WEIGHTS_H_

#include "plan/integers/sampler_state.h"
#include "plan/integers/soft_double.h"

namespace marlin {
namespace kernels {

MARLIN_INLINE bool IsMinusInfinity(float x) { return as_type<uint>(x) == kMinusInfinityBits; }
/// Neither NaN nor +Inf; -Inf excludes a token.
MARLIN_INLINE bool IsLogit(float x) {
  const uint bits = as_type<uint>(x);
  return bits == kMinusInfinityBits || (bits & 0x7fffffffu) < kFloatInfinity;
}

/// a - b, for a >= b.
MARLIN_INLINE Wide Subtract(Wide a, Wide b) {
  const int shift = a.exponent - b.exponent;
  if (b.mantissa == 0 || shift > 63) return a;
  return Normalized((a.mantissa >> 1) - Aligned(b.mantissa, shift), a.exponent + 1);
}

/// largest - x of finite numbers.
MARLIN_INLINE Wide DistanceFrom(float largest, float x) {
  const Wide of_largest = WideOfFloat(largest);
  const Wide of_x = WideOfFloat(x);
  const bool negative = as_type<int>(largest) < 0;
  if (negative != (as_type<int>(x) < 0)) return Add(of_largest, of_x);
  return negative ? Subtract(of_x, of_largest) : Subtract(of_largest, of_x);
}

/// With kFixedBits fraction bits; large numbers become one that has no exponential.
MARLIN_INLINE ulong FixedOfWide(Wide y) {
  constexpr int kLarge = 10;  // 1024
  if (y.mantissa == 0) return 0;
  if (y.exponent >= kLarge) return 1023ul << kFixedBits;
  const int shift = 63 - kFixedBits - y.exponent;
  return shift > 63 ? 0ul : y.mantissa >> shift;
}

/// 1 / x, for x > 0, by long division.
MARLIN_INLINE Wide InverseOf(float x) {
  const Wide wide = WideOfFloat(x);
  const ulong divisor = wide.mantissa >> (64 - kFloatDigits);
  const ulong high = kTopBit / divisor;
  const ulong low = (kTopBit % divisor << 23) / divisor;
  return Normalized((high << 23) + low, -wide.exponent);
}

/// From logits to weights.
struct WeightScale {
  float largest;  ///< The largest logit, whose weight is 2^bits.
  int bits;
  Wide inverse;  ///< Of the temperature.
};

/// The sum over the vocabulary does not overflow.
MARLIN_INLINE int WeightBits(int vocab) { return 30 + int(metal::clz(uint(vocab))); }

MARLIN_INLINE WeightScale ScaleOf(float largest, float temperature, int vocab) {
  WeightScale scale = {largest, WeightBits(vocab), InverseOf(temperature)};
  return scale;
}

/// e^((logit - largest) / temperature), for a logit that is no more than the largest.
MARLIN_INLINE Wide LikelihoodOf(float logit, WeightScale scale) {
  if (IsMinusInfinity(logit)) return Wide{0, 0};
  return ExpOfMinus(FixedOfWide(Multiply(DistanceFrom(scale.largest, logit), scale.inverse)));
}

MARLIN_INLINE ulong WeightOf(float logit, WeightScale scale) {
  const Wide likelihood = LikelihoodOf(logit, scale);
  const int shift = 63 - scale.bits - likelihood.exponent;
  return shift > 63 ? 0ul : likelihood.mantissa >> shift;
}

/// ceil(share * mass), for a share from 0 to 1.
MARLIN_INLINE ulong ShareOf(float share, ulong mass) {
  const Wide wide = WideOfFloat(share);
  if (wide.exponent == 0) return wide.mantissa == 0 ? 0ul : mass;  // 0 or 1.
  const ulong high = MultiplyHigh(wide.mantissa, mass);
  const int shift = -1 - wide.exponent;
  const ulong floored = shift > 63 ? 0ul : high >> shift;
  const bool exact = wide.mantissa * mass == 0 && (shift > 63 ? high == 0 : floored << shift == high);
  return floored + (exact ? 0ul : 1ul);
}

/// The product with a number in [0, 1) that has 53 random bits, rounded down.
MARLIN_INLINE ulong ShareOfRandom(ulong random, ulong mass) {
  return MultiplyHigh(random >> 11 << 11, mass);
}

/// a * b, b > 0, rounded to nearest.
MARLIN_INLINE float RoundedProduct(float a, float b) {
  const float product = FloatOf(Multiply(WideOfFloat(a), WideOfFloat(b)));
  return as_type<float>(as_type<uint>(product) | (as_type<uint>(a) & 0x80000000u));
}

/// a / b, b > 0, rounded to nearest.
MARLIN_INLINE float RoundedQuotient(float a, float b) {
  const Wide of_a = WideOfFloat(a);
  const Wide of_b = WideOfFloat(b);
  constexpr int kDropped = 64 - kFloatDigits;
  const ulong dividend = of_a.mantissa >> kDropped << 39;
  const ulong divisor = of_b.mantissa >> kDropped;
  const ulong rest = dividend % divisor == 0 ? 0ul : 1ul;
  const Wide quotient =
      Normalized(dividend / divisor | rest, of_a.exponent - of_b.exponent + 63 - 39);
  return as_type<float>(as_type<uint>(FloatOf(quotient)) | (as_type<uint>(a) & 0x80000000u));
}

/// A logit after the penalties for a token that was seen (SamplerState). The product and the
/// quotient are integers', so that no compiler joins them with the subtraction.
static inline float PenalizedLogit(float logit, uint seen, DrawOptions options) {
  if ((as_type<uint>(logit) & 0x7fffffffu) >= kFloatInfinity || seen == 0) return logit;
  if (options.repetition_penalty != 1.0f) {
    logit = as_type<int>(logit) > 0 ? RoundedQuotient(logit, options.repetition_penalty)
                                    : RoundedProduct(logit, options.repetition_penalty);
  }
  if (seen == 1) return logit;
  return logit - metal::fma(float(seen / 2), options.frequency_penalty, options.presence_penalty);
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_PLAN_INTEGERS_SAMPLE_WEIGHTS_H_
