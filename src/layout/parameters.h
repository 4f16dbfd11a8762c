// Reads scales, zeros and biases of any type, as numbers.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/scalars.h"
#include "marlin/tensor.h"

namespace marlin {

/// Element `index` of values that may lie at any address. Precondition: a floating-point type of at
/// most 32 bits, or i8.
inline float ParameterAt(const std::byte* data, DType dtype, int64_t index) {
  uint16_t half = 0;
  switch (dtype) {
    case DType::kF8E8M0:
      return E8M0ToFloat(static_cast<uint8_t>(data[index]));
    case DType::kF8E4M3:
      return Fp8E4M3ToFloat(static_cast<uint8_t>(data[index]));
    case DType::kF8E5M2:
      return Fp8E5M2ToFloat(static_cast<uint8_t>(data[index]));
    case DType::kF16:
    case DType::kBf16:
      std::memcpy(&half, data + index * 2, sizeof(half));
      return dtype == DType::kBf16 ? Bf16ToFloat(half) : HalfToFloat(half);
    case DType::kI8:
      return static_cast<int8_t>(data[index]);
    default:
      break;
  }
  float value = 0;
  std::memcpy(&value, data + index * 4, sizeof(value));
  return value;
}

/// Element `index` of a contiguous view.
inline float ParameterAt(const TensorView& view, int64_t index) {
  return ParameterAt(view.As<std::byte>(), view.dtype(), index);
}

}  // namespace marlin
