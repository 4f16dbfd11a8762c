// Loads of a type that is known before a loop: a switch in every load would keep the loads of a
// loop from being in flight together.
#pragma once

#include <type_traits>

#include "backends/cuda/common/fragment_math.cuh"
#include "backends/cuda/layout/device_views.h"

namespace marlin::cuda {

template <typename T>
MARLIN_DEVICE float ToFloat(T value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat162float(value);
  } else {
    return __half2float(value);
  }
}

template <typename T>
MARLIN_DEVICE T FromFloat(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return __float2half_rn(value);
  }
}

/// A value as a store to `type` rounds it.
MARLIN_DEVICE float Rounded(float value, Element type) {
  if (type == Element::kBf16) return __bfloat162float(__float2bfloat16_rn(value));
  return type == Element::kF16 ? __half2float(__float2half_rn(value)) : value;
}

/// Stores two numbers at an address aligned to both.
template <typename T>
MARLIN_DEVICE void StorePair(T* to, float low, float high) {
  if constexpr (std::is_same_v<T, float>) {
    *reinterpret_cast<float2*>(to) = make_float2(low, high);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    *reinterpret_cast<uint32_t*>(to) = Bf16x2::Pack(low, high);
  } else {
    *reinterpret_cast<uint32_t*>(to) = F16x2::Pack(low, high);
  }
}

/// Four adjacent numbers, at a multiple of four of them.
MARLIN_DEVICE float4 LoadFour(const void* data, Element type, int64_t at) {
  if (type == Element::kF32) {
    return *reinterpret_cast<const float4*>(static_cast<const float*>(data) + at);
  }
  const uint2 packed = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(data) + at);
  const bool bf16 = type == Element::kBf16;
  const float2 low = bf16 ? Bf16x2::Unpack(packed.x) : F16x2::Unpack(packed.x);
  const float2 high = bf16 ? Bf16x2::Unpack(packed.y) : F16x2::Unpack(packed.y);
  return {low.x, low.y, high.x, high.y};
}

/// Stores four adjacent numbers, at a multiple of four of them.
MARLIN_DEVICE void StoreFour(void* data, Element type, int64_t at, const float4& v) {
  if (type == Element::kF32) {
    *reinterpret_cast<float4*>(static_cast<float*>(data) + at) = v;
    return;
  }
  const bool bf16 = type == Element::kBf16;
  const uint2 packed = {bf16 ? Bf16x2::Pack(v.x, v.y) : F16x2::Pack(v.x, v.y),
                        bf16 ? Bf16x2::Pack(v.z, v.w) : F16x2::Pack(v.z, v.w)};
  *reinterpret_cast<uint2*>(static_cast<uint16_t*>(data) + at) = packed;
}

/// Calls run(T()) with the type of an element.
template <typename Run>
MARLIN_DEVICE void WithType(Element type, const Run& run) {
  if (type == Element::kF32) {
    run(float());
  } else if (type == Element::kBf16) {
    run(__nv_bfloat16());
  } else {
    run(__half());
  }
}

/// Stores adjacent elements.
template <int kCount>
MARLIN_DEVICE void StoreAdjacent(void* data, Element type, int64_t at,
                                 const float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (type == Element::kF32) static_cast<float*>(data)[at + i] = values[i];
  }
  if (type == Element::kF32) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t bits =
        type == Element::kBf16 ? Bf16x2::Pack(values[i], 0.0f) : F16x2::Pack(values[i], 0.0f);
    static_cast<uint16_t*>(data)[at + i] = static_cast<uint16_t>(bits);
  }
}

}  // namespace marlin::cuda
