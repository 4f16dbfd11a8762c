// Loads and rounds single elements of the floating-point types, in double precision.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "base/scalars.h"
#include "marlin/tensor.h"

namespace marlin::reference {

/// Element `index` of an array of f32, bf16, f16, E8M0, E4M3, E5M2 or i8; exact. Other types give
/// NaN.
inline double LoadElement(const void* data, DType dtype, int64_t index) {
  const auto* bytes = static_cast<const uint8_t*>(data) + index * DTypeBytes(dtype);
  uint16_t half = 0;
  float single = 0;
  switch (dtype) {
    case DType::kF32:
      std::memcpy(&single, bytes, sizeof(single));
      return single;
    case DType::kBf16:
      std::memcpy(&half, bytes, sizeof(half));
      return Bf16ToFloat(half);
    case DType::kF16:
      std::memcpy(&half, bytes, sizeof(half));
      return HalfToFloat(half);
    case DType::kF8E8M0:
      return E8M0ToFloat(*bytes);
    case DType::kF8E4M3:
      return Fp8E4M3ToFloat(*bytes);
    case DType::kF8E5M2:
      return Fp8E5M2ToFloat(*bytes);
    case DType::kI8:
      return static_cast<int8_t>(*bytes);
    default:
      return std::numeric_limits<double>::quiet_NaN();
  }
}

/// The elements of a view in C order.
inline std::vector<double> Elements(const TensorView& view) {
  std::vector<double> elements;
  Shape index;
  for (int i = 0; i < view.rank(); ++i) index.Append(0);
  for (int64_t count = view.ElementCount(); count > 0; --count) {
    int64_t offset = 0;
    for (int i = 0; i < view.rank(); ++i) offset += index[i] * view.stride(i);
    elements.push_back(LoadElement(view.data(), view.dtype(), offset));
    for (int i = view.rank() - 1; i >= 0 && ++index[i] == view.dim(i); --i) index[i] = 0;
  }
  return elements;
}

/// Significand bits, smallest exponent and largest finite value of an output type.
struct FloatType {
  int precision;
  int min_exponent;  ///< The smallest normal number is 2^min_exponent.
  double largest;
};
inline FloatType FloatTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return {8, -126, 0x1.FEp127};
    case DType::kF16:
      return {11, -14, 65504.0};
    default:
      return {24, -126, 0x1.FFFFFEp127};
  }
}

/// x rounded once to f32, bf16 or f16 (nearest, ties to even; overflow gives Inf), as a double.
inline double RoundTo(double x, DType dtype) {
  if (!std::isfinite(x) || x == 0) return x;
  const FloatType type = FloatTypeOf(dtype);
  int exponent = 0;
  (void)std::frexp(x, &exponent);  // |x| in [2^(exponent - 1), 2^exponent)
  const int lowest = std::max(exponent - 1, type.min_exponent) - (type.precision - 1);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, -lowest)), lowest);
  if (std::abs(rounded) > type.largest) {
    return std::copysign(std::numeric_limits<double>::infinity(), x);
  }
  return rounded;
}

}  // namespace marlin::reference
