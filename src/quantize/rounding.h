// Single rounding from an exact value to f32, bf16 or f16.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "base/scalars.h"
#include "marlin/tensor.h"

namespace marlin {

/// a + b rounded to odd: inexact sums get an odd last bit, so that a later rounding to any narrower
/// type equals a single rounding of the exact sum.
inline double AddToOdd(double a, double b) {
  const double sum = a + b;
  const double b_part = sum - a;
  const double error = (a - (sum - b_part)) + (b - b_part);
  const auto bits = std::bit_cast<uint64_t>(sum);
  if (error == 0.0 || (bits & 1u) != 0 || !std::isfinite(sum)) return sum;
  const bool away = (error > 0.0) == (sum > 0.0);
  return std::bit_cast<double>(away ? bits + 1 : bits - 1);
}

/// The fp32 next to x with an odd last bit, or x itself when fp32 holds it.
inline float FloatToOdd(double x) {
  const auto nearest = static_cast<float>(x);
  const auto bits = std::bit_cast<uint32_t>(nearest);
  if (static_cast<double>(nearest) == x || (bits & 1u) != 0 || std::isnan(x)) return nearest;
  const bool too_large = std::fabs(static_cast<double>(nearest)) > std::fabs(x);
  return std::bit_cast<float>(too_large ? bits - 1 : bits + 1);
}

/// Output element types, with the rounding of an exact double to each, or of an fp32.
struct F32Element {
  using Stored = float;
  static Stored Round(double exact) { return static_cast<float>(exact); }
  static Stored Round(float value) { return value; }
  static bool IsFinite(Stored value) { return std::isfinite(value); }
};
struct Bf16Element {
  using Stored = uint16_t;
  static Stored Round(double exact) { return FloatToBf16(FloatToOdd(exact)); }
  static Stored Round(float value) { return FloatToBf16(value); }
  static bool IsFinite(Stored bits) { return (bits & 0x7f80u) != 0x7f80u; }
};
struct F16Element {
  using Stored = uint16_t;
  static Stored Round(double exact) { return FloatToHalf(FloatToOdd(exact)); }
  static Stored Round(float value) { return FloatToHalf(value); }
  static bool IsFinite(Stored bits) { return (bits & 0x7c00u) != 0x7c00u; }
};

/// Calls body<Element>() for the element type of an output: f32, bf16 or f16.
template <typename Body>
decltype(auto) WithElement(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kBf16:
      return body.template operator()<Bf16Element>();
    case DType::kF16:
      return body.template operator()<F16Element>();
    default:
      return body.template operator()<F32Element>();
  }
}

}  // namespace marlin
