// Stores single elements of the small floating-point types.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/scalars.h"
#include "marlin/format.h"
#include "marlin/tensor.h"

namespace marlin::conformance {

/// Rounds to f32, bf16 or f16 and stores element `index`.
inline void StoreElement(void* data, DType dtype, int64_t index, double value) {
  auto* bytes = static_cast<uint8_t*>(data) + index * DTypeBytes(dtype);
  const auto single = static_cast<float>(value);
  if (dtype == DType::kF32) {
    std::memcpy(bytes, &single, sizeof(single));
    return;
  }
  const uint16_t half = dtype == DType::kBf16 ? FloatToBf16(single) : FloatToHalf(single);
  std::memcpy(bytes, &half, sizeof(half));
}

/// Stores a scale in its type; E8M0 accepts powers of two only.
inline void StoreScale(void* data, ScaleType type, int64_t index, double value) {
  if (type == ScaleType::kE8M0) {
    static_cast<uint8_t*>(data)[index] = static_cast<uint8_t>(std::ilogb(value) + 127);
  } else if (type == ScaleType::kE4M3) {
    static_cast<uint8_t*>(data)[index] = FloatToFp8E4M3(static_cast<float>(value));
  } else {
    StoreElement(data, ScaleDType(type), index, value);
  }
}

}  // namespace marlin::conformance
