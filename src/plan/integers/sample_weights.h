// The arithmetic of draws, on integers, so that a draw has the same tokens on every device: tokens
// have weights in proportion to their probabilities, whose sums do not depend on an order.
//
//   order    by logit, the most likely first, ties by id
//   top-k    the first k
//   top-p    the shortest start of the order with ShareOf(top_p, sum of the weights)
//   min-p    those with at least ShareOf(min_p, weight of the most likely token)
//   draw     the first token at which the sum of the weights exceeds ShareOfRandom of all
//
// Logits are the bits of floats: compilers with fast math take it that none is infinite or NaN.
// Compiles as C++20 and as Metal Shading Language.
#ifndef MARLIN_PLAN_INTEGERS_SAMPLE_WEIGHTS_H_
#define MARLIN_PLAN_INTEGERS_SAMPLE_WEIGHTS_H_

#include "plan/integers/sampler_state.h"
#include "plan/integers/soft_double.h"

namespace marlin {
namespace kernels {

/// Neither NaN nor +Inf; -Inf excludes a token.
MARLIN_INLINE bool IsLogit(uint x) {
  return x == kMinusInfinityBits || (x & 0x7fffffffu) < kFloatInfinity;
}

/// a - b, for a >= b.
MARLIN_INLINE Wide Subtract(Wide a, Wide b) {
  const int shift = a.exponent - b.exponent;
  if (b.mantissa == 0 || shift > 63) return a;
  return Normalized((a.mantissa >> 1) - Aligned(b.mantissa, shift), a.exponent + 1);
}

/// largest - x of finite logits.
MARLIN_INLINE Wide DistanceFrom(uint largest, uint x) {
  const Wide of_largest = WideOfBits(largest);
  const Wide of_x = WideOfBits(x);
  const bool negative = (largest >> 31) != 0;
  if (negative != ((x >> 31) != 0)) return Add(of_largest, of_x);
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
  uint largest;  ///< The largest logit, whose weight is 2^bits.
  int bits;
  Wide inverse;     ///< 1 / temperature.
  ulong vanishing;  ///< A distance from which on weights are 0, with kFixedBits fraction bits.
};

/// The sum over the vocabulary does not overflow.
MARLIN_INLINE int WeightBits(int vocab) { return 30 + int(metal::clz(uint(vocab))); }

MARLIN_INLINE WeightScale ScaleOf(uint largest, Wide inverse, int bits) {
  const ulong vanishing = MultiplyHigh(ulong(bits + 1) << kFixedBits, kLn2);
  WeightScale scale = {largest, bits, inverse, vanishing};
  return scale;
}

/// 2^bits e^((logit - largest) / temperature), for a logit that is no more than the largest.
MARLIN_INLINE ulong WeightOf(uint logit, WeightScale scale) {
  if (logit == kMinusInfinityBits) return 0;
  const ulong y = FixedOfWide(Multiply(DistanceFrom(scale.largest, logit), scale.inverse));
  if (y >= scale.vanishing) return 0;
  const Wide likelihood = ExpOfMinus(y);
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
  const bool exact =
      wide.mantissa * mass == 0 && (shift > 63 ? high == 0 : floored << shift == high);
  return floored + (exact ? 0ul : 1ul);
}

/// The product with a number in [0, 1) that has 53 random bits, rounded down.
MARLIN_INLINE ulong ShareOfRandom(ulong random, ulong mass) {
  return MultiplyHigh(random >> 11 << 11, mass);
}

/// |a * b| rounded to nearest, b > 0.
MARLIN_INLINE uint RoundedProduct(uint a, float b) {
  return uint(RoundedBits(Multiply(WideOfBits(a), WideOfFloat(b)), kFloatDigits, kFloatLeast));
}

/// |a / b| rounded to nearest, b > 0.
MARLIN_INLINE uint RoundedQuotient(uint a, float b) {
  const Wide of_a = WideOfBits(a);
  const Wide of_b = WideOfFloat(b);
  constexpr int kDropped = 64 - kFloatDigits;
  const ulong dividend = of_a.mantissa >> kDropped << 39;
  const ulong divisor = of_b.mantissa >> kDropped;
  const ulong rest = dividend % divisor == 0 ? 0ul : 1ul;
  const Wide quotient =
      Normalized(dividend / divisor | rest, of_a.exponent - of_b.exponent + 63 - 39);
  return uint(RoundedBits(quotient, kFloatDigits, kFloatLeast));
}

/// A logit after the penalties for a token that was seen (SamplerState). The product and the
/// quotient are integers', so that no compiler joins them with the subtraction.
static inline uint PenalizedLogit(uint logit, uint seen, DrawOptions options) {
  constexpr uint kSign = 0x80000000u;
  if ((logit & ~kSign) >= kFloatInfinity || seen == 0) return logit;
  if (options.repetition_penalty != 1.0f) {
    logit = logit - 1 < kSign - 1 ? RoundedQuotient(logit, options.repetition_penalty)
                                  : (RoundedProduct(logit, options.repetition_penalty) | kSign);
  }
  if (seen == 1 || (logit & ~kSign) >= kFloatInfinity) return logit;
  const uint count = seen / 2;
  const float penalty =
      metal::fma(float(count), options.frequency_penalty, options.presence_penalty);
  return as_type<uint>(as_type<float>(logit) - penalty);
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_PLAN_INTEGERS_SAMPLE_WEIGHTS_H_
