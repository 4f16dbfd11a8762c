// The element types of a paged KV cache, which may be e4m3 codes without a scale.
#pragma once

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/rows/typed.cuh"

namespace marlin::cuda {

/// An e4m3 number.
struct Fp8 {
  uint8_t code;
};

/// Two codes, the first in the low byte, as halves, exactly. NaN stays NaN.
MARLIN_DEVICE uint32_t HalvesOfCodes(uint32_t codes) {
  return E4M3x4::ToF16(static_cast<uint16_t>(codes));
}

MARLIN_DEVICE float ToFloat(Fp8 value) { return F16x2::Unpack(HalvesOfCodes(value.code)).x; }

/// WithType for the elements of a cache.
template <typename Run>
MARLIN_DEVICE void WithCacheType(Element type, const Run& run) {
  if (type == Element::kE4M3) {
    run(Fp8());
  } else {
    WithType(type, run);
  }
}

MARLIN_HOST_DEVICE constexpr int CacheElementBytes(Element type) {
  if (type == Element::kE4M3) return 1;
  return type == Element::kF32 ? 4 : 2;
}

/// StoreFloat, also to a cache: e4m3 rounds to nearest even and saturates, and NaN stays NaN.
MARLIN_DEVICE void StoreCached(void* data, Element type, int64_t i, float value) {
  if (type == Element::kE4M3) {
    static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(E4M3x4::FromFloats(value, 0.0f));
  } else {
    StoreFloat(data, type, i, value);
  }
}

/// StoreFour, also to a cache.
MARLIN_DEVICE void StoreFourCached(void* data, Element type, int64_t at, const float4& v) {
  if (type != Element::kE4M3) return StoreFour(data, type, at, v);
  const uint32_t low = E4M3x4::FromFloats(v.x, v.y);
  const uint32_t high = E4M3x4::FromFloats(v.z, v.w);
  *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(data) + at) = high << 16 | low;
}

/// Two codes as bf16 numbers, exactly.
MARLIN_DEVICE uint32_t Bf16OfCodes(uint32_t codes) {
  const float2 values = F16x2::Unpack(HalvesOfCodes(codes));
  return Bf16x2::Pack(values.x, values.y);
}

/// Eight codes as bf16 numbers, exactly.
MARLIN_DEVICE uint4 WidenCodes(const uint2& codes) {
  return make_uint4(Bf16OfCodes(codes.x), Bf16OfCodes(codes.x >> 16), Bf16OfCodes(codes.y),
                    Bf16OfCodes(codes.y >> 16));
}

/// Widens rows of codes, contiguous in shared memory, to rows of bf16 numbers,
/// `row_bytes` apart. `features` is a multiple of 8. Thread `thread` of `threads` takes its part.
MARLIN_DEVICE void WidenRows(uint32_t from, int rows, int features, uint32_t to, int row_bytes,
                             int thread, int threads) {
  const int units = features / 8;
  const int row_step = threads / units;
  const int unit_step = threads % units;
  int row = thread / units;
  int unit = thread % units;
  uint32_t source = from + thread * 8;
#pragma unroll 4
  while (row < rows) {
    StoreShared16(to + row * row_bytes + unit * 16, WidenCodes(LoadShared8(source)));
    source += threads * 8;
    row += row_step;
    unit += unit_step;
    if (unit >= units) {
      unit -= units;
      ++row;
    }
  }
}

}  // namespace marlin::cuda
