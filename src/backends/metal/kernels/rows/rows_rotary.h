// A head as attention reads it: its RMS norm, and RoPE.
//
//   angle    frequency * position in quarters of a turn, on integers: exact to 2^-62 quarters, so
//            that large positions keep their precision, and the same under every compiler option
//   sine     polynomials to an ULP for the rest of the angle, at most pi / 4
//   lanes    lane l has features and pairs l, l + 32, ...
#ifndef MARLIN_BACKENDS_METAL_KERNELS_ROWS_ROWS_ROTARY_H_
#define MARLIN_BACKENDS_METAL_KERNELS_ROWS_ROWS_ROTARY_H_

#include "backends/metal/kernels/rows/rows_norm.h"
#include "plan/integers/soft_double.h"

namespace marlin {
namespace kernels {

constant constexpr ulong kTwoOverPi = 0xa2f9836e4e44152aul;  ///< 2 / pi * 2^64
constant constexpr ulong kHalfPi = 0xc90fdaa22168c235ul;     ///< pi / 2 * 2^63
/// Angles in quarters of a turn have this many fraction bits.
constant constexpr int kQuarterBits = 62;

/// |frequency| * position in quarters of a turn, modulo 4. An infinite frequency gives any angle.
static inline ulong QuartersOf(float frequency, int position) {
  const uint bits = as_type<uint>(frequency) & 0x7fffffffu;
  const int exponent = metal::max(int(bits >> 23), 1);
  const ulong significand = (bits & 0x7fffffu) | (bits < 0x800000u ? 0u : 0x800000u);
  const ulong product = significand * ulong(position);  // At most 55 bits.
  if (product == 0) return 0;
  const int zeros = LeadingZeros(product);
  const ulong quarters = MultiplyHigh(product << zeros, kTwoOverPi);
  // The product has 150 - exponent fraction bits, `quarters` has `zeros` more.
  const int drop = 150 - exponent + zeros - kQuarterBits;
  if (drop >= 64 || drop <= -64) return 0;
  return drop >= 0 ? quarters >> drop : quarters << -drop;
}

/// Sine and cosine of angles up to pi / 4 in size.
static inline float SineOfEighth(float x) {
  const float square = x * x;
  const float tail = metal::fma(metal::fma(-1.9515295891e-4f, square, 8.3321608736e-3f), square,
                                -1.6666654611e-1f);
  return metal::fma(tail * square, x, x);
}
static inline float CosineOfEighth(float x) {
  const float square = x * x;
  const float tail = metal::fma(metal::fma(2.443315711809948e-5f, square, -1.388731625493765e-3f),
                                square, 4.166664568298827e-2f);
  return metal::fma(tail * square, square, metal::fma(-0.5f, square, 1.0f));
}

/// Cosine and sine of a pair's rotation, times the factor.
static METAL_FUNC float2 RotationOf(float frequency, int position, float factor) {
  const ulong angle = QuartersOf(frequency, position);
  const ulong nearest = (angle + (1ul << (kQuarterBits - 1))) >> kQuarterBits;
  const ulong rest = angle - (nearest << kQuarterBits);  // Modulo 2^64, of either sign.
  const bool below = (rest >> 63) != 0;
  const ulong size = below ? 0ul - rest : rest;
  const float radians = float(MultiplyHigh(size << 2, kHalfPi)) * 1.0842021724855044e-19f;
  const float x = below ? -radians : radians;
  const float s = SineOfEighth(x);
  const float c = CosineOfEighth(x);
  const int quadrant = int(nearest & 3ul);
  const float first = (quadrant & 1) != 0 ? s : c;
  const float second = (quadrant & 1) != 0 ? c : s;
  const float cosine = quadrant == 1 || quadrant == 2 ? -first : first;
  const float sine = (quadrant >= 2) != (as_type<uint>(frequency) >> 31 != 0) ? -second : second;
  return float2(factor * cosine, factor * sine);
}

/// Where a head comes from and goes to, which may be the same.
struct Head {
  device const uchar* from;
  device uchar* to;
  device const uchar* norm;  ///< Null: none.
  int type;
  int to_type;
  int norm_type;
  int features;
  int pairs;  ///< That rotate; may be 0.
};

/// The factor of a head's norm, 1 without one. By all lanes of a simdgroup.
static METAL_FUNC float FactorOfHead(Head head, float epsilon, float one, ushort lane) {
  if (head.norm == nullptr) return 1.0f;
  float squares = 0.0f;
  for (int i = lane; i < head.features; i += kLanes) {
    const float value = LoadElement(head.from, head.type, i);
    squares = metal::fma(value, value, squares);
  }
  const float sum = metal::simd_broadcast_first(ValueOfSum(SumOfLanes(float2(squares, 0.0f), one)));
  // Other lanes write what a lane has read.
  metal::simdgroup_barrier(metal::mem_flags::mem_device);
  return RmsFactor(sum, head.features, epsilon);
}

/// A feature after the norm, as a norm in place rounds it.
static inline float FeatureOf(Head head, int i, float factor) {
  const float value = LoadElement(head.from, head.type, i);
  if (head.norm == nullptr) return value;
  const float weight = LoadElement(head.norm, head.norm_type, i);
  return Rounded(TimesNorm(value, factor, weight), head.type);
}

/// Stores a head after its norm, which has `factor`, and RoPE. A lane reads and writes only its own
/// features.
static METAL_FUNC void StoreHead(Head head, float factor, device const float* frequencies,
                                 RotaryParameters rotary, int position, ushort lane) {
  for (int pair = lane; pair < head.pairs; pair += kLanes) {
    const float2 rotation = RotationOf(frequencies[pair], position, rotary.factor);
    const int first = rotary.interleaved ? 2 * pair : pair;
    const int second = rotary.interleaved ? 2 * pair + 1 : pair + head.pairs;
    const float a = FeatureOf(head, first, factor);
    const float b = FeatureOf(head, second, factor);
    const float turned_a = metal::fma(a, rotation.x, -(b * rotation.y));
    const float turned_b = metal::fma(b, rotation.x, a * rotation.y);
    StoreElement(head.to, head.to_type, first, Rounded(turned_a, head.type));
    StoreElement(head.to, head.to_type, second, Rounded(turned_b, head.type));
  }
  if (head.to == head.from && head.norm == nullptr) return;
  for (int i = 2 * head.pairs + lane; i < head.features; i += kLanes) {
    StoreElement(head.to, head.to_type, i, FeatureOf(head, i, factor));
  }
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_ROWS_ROWS_ROTARY_H_
