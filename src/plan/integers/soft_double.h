// Double precision on integers: the values that decide a router's selection or a draw, and the
// exponential. GPUs have no doubles, and integers give the same bits on every device and under
// every compiler option, fast math included, where sums of two floats depend on the order that the
// source has. Compiles as C++20 and as Metal Shading Language.
//
// A Wide is an unsigned number of 64 bits: its functions truncate, with relative errors below
// 2^-50. Doubles are IEEE bits in a ulong: AddDoubles rounds to nearest, ties to even, as the
// hardware of a CPU does, so that ties are ties on both.
#ifndef MARLIN_PLAN_INTEGERS_SOFT_DOUBLE_H_
#define MARLIN_PLAN_INTEGERS_SOFT_DOUBLE_H_

#include "plan/integers/both_languages.h"

namespace marlin {
namespace kernels {

/// mantissa * 2^(exponent - 63); the mantissa's top bit is set, or the mantissa is 0.
struct Wide {
  ulong mantissa;
  int exponent;
};

MARLIN_SHARED ulong kTopBit = 1ul << 63;
MARLIN_SHARED ulong kWideLog2E = 0xb8aa3b295c17f0bcul;  ///< log2(e) * 2^63
MARLIN_SHARED ulong kLn2 = 0xb17217f7d1cf79acul;    ///< ln(2) * 2^64
/// Fixed-point numbers, and distances of logits, have 51 fraction bits.
MARLIN_SHARED int kFixedBits = 51;

/// An IEEE format: bits of the significand with the implicit one, and the least normal exponent.
MARLIN_SHARED int kFloatDigits = 24;
MARLIN_SHARED int kFloatLeast = -126;
MARLIN_SHARED uint kFloatInfinity = 0x7f800000u;
MARLIN_SHARED uint kMinusInfinityBits = 0xff800000u;
MARLIN_SHARED int kDoubleDigits = 53;
MARLIN_SHARED int kDoubleLeast = -1022;
MARLIN_SHARED ulong kDoubleInfinity = 0x7ff0000000000000ul;

MARLIN_INLINE ulong LargerOf(ulong a, ulong b) { return a > b ? a : b; }
MARLIN_INLINE ulong SmallerOf(ulong a, ulong b) { return a < b ? a : b; }

MARLIN_INLINE int LeadingZeros(ulong x) {
  const uint high = uint(x >> 32);
  return int(high != 0 ? metal::clz(high) : 32u + metal::clz(uint(x)));
}

/// The upper half of a product.
MARLIN_INLINE ulong MultiplyHigh(ulong a, ulong b) {
#if defined(__SIZEOF_INT128__) && !defined(__METAL_VERSION__)
  __extension__ using Product = unsigned __int128;
  return static_cast<ulong>(static_cast<Product>(a) * b >> 64);
#else
  const ulong a_low = a & 0xfffffffful;
  const ulong a_high = a >> 32;
  const ulong b_low = b & 0xfffffffful;
  const ulong b_high = b >> 32;
  const ulong middle = a_high * b_low + (a_low * b_low >> 32);
  const ulong carried = a_low * b_high + (middle & 0xfffffffful);
  return a_high * b_high + (middle >> 32) + (carried >> 32);
#endif
}

/// mantissa * 2^(exponent - 63) of any mantissa.
MARLIN_INLINE Wide Normalized(ulong mantissa, int exponent) {
  const int zeros = LeadingZeros(mantissa);
  Wide wide;
  wide.mantissa = mantissa == 0 ? 0ul : mantissa << zeros;
  wide.exponent = mantissa == 0 ? 0 : exponent - zeros;
  return wide;
}

MARLIN_INLINE Wide Multiply(Wide a, Wide b) {
  return Normalized(MultiplyHigh(a.mantissa, b.mantissa), a.exponent + b.exponent + 1);
}

/// mantissa / 2^(1 + shift), shift < 64, whose last bit also says whether any bit is shifted out:
/// what rounds a sum afterwards sees a tie only where there is one.
MARLIN_INLINE ulong Aligned(ulong mantissa, int shift) {
  const ulong shifted = mantissa >> 1 >> shift;
  return shifted << shift << 1 == mantissa ? shifted : shifted | 1ul;
}

MARLIN_INLINE Wide Add(Wide a, Wide b) {
  if (a.mantissa == 0) return b;
  if (b.mantissa == 0) return a;
  const bool swap = a.exponent < b.exponent;
  const Wide larger = swap ? b : a;
  const Wide smaller = swap ? a : b;
  const int shift = larger.exponent - smaller.exponent;
  if (shift > 63) return larger;
  return Normalized((larger.mantissa >> 1) + Aligned(smaller.mantissa, shift), larger.exponent + 1);
}

/// 1 / a, for a > 0: an estimate in fp32, and two steps of Newton's method, x (2 - a x).
MARLIN_INLINE Wide Reciprocal(Wide a) {
  const float estimate = 8388608.0f / float(uint(a.mantissa >> 40));  // Exact operands.
  ulong x = ulong(uint(estimate * 2147483648.0f)) << 32;              // * 2^63
  MARLIN_UNROLL
  for (int step = 0; step < 2; ++step) {
    x = MultiplyHigh(x, kTopBit - MultiplyHigh(a.mantissa, x)) << 2;
  }
  return Normalized(x, -a.exponent);
}

/// mantissa / 2^drop, drop > 0, to nearest, ties to even.
MARLIN_INLINE ulong RoundedShift(ulong mantissa, int drop) {
  if (drop > 64) return 0;
  const ulong kept = drop == 64 ? 0ul : mantissa >> drop;
  const ulong half_bit = mantissa >> (drop - 1) & 1ul;
  const bool rest = (mantissa & ((1ul << (drop - 1)) - 1ul)) != 0;
  return kept + (rest ? half_bit : half_bit & kept);
}

/// The bits of |a| in an IEEE format, rounded to nearest; too large: infinity.
MARLIN_INLINE ulong RoundedBits(Wide a, int digits, int least) {
  if (a.mantissa == 0) return 0;
  const int below = metal::max(least - a.exponent, 0);  // A subnormal number has fewer digits.
  const ulong significand = RoundedShift(a.mantissa, 64 - digits + metal::min(below, 64));
  const ulong exponent = ulong(metal::max(a.exponent - least, 0)) << (digits - 1);
  // The implicit one, and a carry of the rounding, add 1 to the exponent.
  const ulong infinity = digits == kFloatDigits ? ulong(kFloatInfinity) : kDoubleInfinity;
  return SmallerOf(exponent + significand, infinity);
}

/// The number that has these bits, without a sign.
MARLIN_INLINE Wide WideOf(ulong bits, int digits, int least) {
  const int exponent = int(bits >> (digits - 1));
  const ulong fraction = bits & ((1ul << (digits - 1)) - 1ul);
  const ulong implicit = exponent == 0 ? 0ul : 1ul << (digits - 1);
  return Normalized(fraction | implicit, metal::max(exponent, 1) + least - digits + 63);
}

/// The float that has these bits, without its sign.
MARLIN_INLINE Wide WideOfBits(uint x) { return WideOf(x & 0x7fffffffu, kFloatDigits, kFloatLeast); }

MARLIN_INLINE Wide WideOfFloat(float x) { return WideOfBits(as_type<uint>(x)); }

MARLIN_INLINE float FloatOf(Wide a) {
  return as_type<float>(uint(RoundedBits(a, kFloatDigits, kFloatLeast)));
}

MARLIN_INLINE ulong DoubleOf(Wide a) { return RoundedBits(a, kDoubleDigits, kDoubleLeast); }

MARLIN_INLINE ulong DoubleOfFloat(float x) {
  const uint bits = as_type<uint>(x);
  const ulong sign = ulong(bits >> 31) << 63;
  if ((bits & 0x7fffffffu) >= kFloatInfinity) return sign | kDoubleInfinity;
  return sign | DoubleOf(WideOfFloat(x));
}

MARLIN_INLINE ulong AddDoubles(ulong a, ulong b) {
  const bool swap = (a & ~kTopBit) < (b & ~kTopBit);
  const ulong larger = swap ? b : a;
  const ulong smaller = swap ? a : b;
  if ((larger & ~kTopBit) >= kDoubleInfinity) return larger;
  const Wide x = WideOf(larger & ~kTopBit, kDoubleDigits, kDoubleLeast);
  const Wide y = WideOf(smaller & ~kTopBit, kDoubleDigits, kDoubleLeast);
  if (y.mantissa == 0) return larger;
  // 11 bits are free: one for the carry, and for the last, whether any bit is shifted out.
  const ulong aligned = Aligned(y.mantissa, metal::min(x.exponent - y.exponent, 63));
  const bool differ = ((a ^ b) & kTopBit) != 0;
  const ulong mantissa = (x.mantissa >> 1) + (differ ? 0ul - aligned : aligned);
  if (mantissa == 0) return 0;
  return (larger & kTopBit) | DoubleOf(Normalized(mantissa, x.exponent + 1));
}

/// Bits that are ordered as the doubles are; both zeros are one. 0 is below all of them.
MARLIN_INLINE ulong OrderedOf(ulong bits) {
  if (bits << 1 == 0) return kTopBit;
  return (bits & kTopBit) != 0 ? ~bits : bits | kTopBit;
}

MARLIN_INLINE ulong DoubleOfOrdered(ulong ordered) {
  return (ordered & kTopBit) != 0 ? ordered & ~kTopBit : ~ordered;
}

/// |x| with kFixedBits fraction bits, for |x| < 2048.
MARLIN_INLINE ulong FixedOf(float x) {
  const uint bits = as_type<uint>(x) & 0x7fffffffu;
  const int exponent = int(bits >> 23);
  const ulong fraction = (bits & 0x7fffffu) | (exponent == 0 ? 0u : 0x800000u);
  const int shift = metal::max(exponent, 1) - 150 + kFixedBits;
  return shift >= 0 ? fraction << shift : RoundedShift(fraction, -shift);
}

/// e^-y of a fixed-point number: 2^-n times e^-w, whose eighth of w a polynomial takes.
MARLIN_INLINE Wide ExpOfMinus(ulong y) {
  constexpr ulong kVanishing = 750ul << kFixedBits;  // The double of e^-750 is 0.
  if (y >= kVanishing) return Wide{0, 0};
  constexpr int kRestBits = kFixedBits - 1;
  const ulong binary = MultiplyHigh(y, kWideLog2E);  // With kRestBits fraction bits.
  const ulong w = MultiplyHigh(binary << (64 - kRestBits), kLn2) >> 3;  // * 2^64
  ulong power = kTopBit / 362880;                                       // 2^63 / 9!
  power = kTopBit / 40320 - MultiplyHigh(w, power);
  power = kTopBit / 5040 - MultiplyHigh(w, power);
  power = kTopBit / 720 - MultiplyHigh(w, power);
  power = kTopBit / 120 - MultiplyHigh(w, power);
  power = kTopBit / 24 - MultiplyHigh(w, power);
  power = kTopBit / 6 - MultiplyHigh(w, power);
  power = kTopBit / 2 - MultiplyHigh(w, power);
  power = kTopBit - MultiplyHigh(w, power);
  power = kTopBit - MultiplyHigh(w, power);
  MARLIN_UNROLL
  for (int i = 0; i < 3; ++i) power = MultiplyHigh(power, power) << 1;
  return Normalized(power, -int(binary >> kRestBits));
}

/// ln x, for x >= 1: a square of the mantissa for each bit of its binary logarithm.
MARLIN_INLINE Wide LogOf(Wide x) {
  constexpr int kBits = 63;
  ulong fraction = 0;
  ulong mantissa = x.mantissa;
  for (int bit = 0; bit < kBits; ++bit) {
    mantissa = MultiplyHigh(mantissa, mantissa);
    const ulong carry = mantissa >> 63;
    fraction = fraction << 1 | carry;
    mantissa = carry != 0 ? mantissa : mantissa << 1;
  }
  const Wide binary = Add(Normalized(ulong(x.exponent), 63), Normalized(fraction, 0));
  return Multiply(binary, Wide{kLn2, -1});
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_PLAN_INTEGERS_SOFT_DOUBLE_H_
