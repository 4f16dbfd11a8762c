// The types of cuda_bf16.h, cuda_fp16.h and cuda_fp8.h, as far as kernels use them, and arithmetic
// that rounds once.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "base/scalars.h"
#include "cuda_emulation/vector_types.h"

namespace cuda_emulation {

/// a b + c, exact except for bits far below fp32's: to be rounded to 16 bits. The lowest bit is
/// set where any is lost (round to odd), so that a second rounding is right.
inline double ExactFma(float a, float b, float c) {
  const double product = static_cast<double>(a) * static_cast<double>(b);
  const double term = static_cast<double>(c);
  const double sum = product + term;
  const double of_term = sum - product;
  const double lost = (product - (sum - of_term)) + (term - of_term);
  const auto bits = std::bit_cast<uint64_t>(sum);
  if (!std::isfinite(sum) || lost == 0 || (bits & 1u) != 0) return sum;
  return std::bit_cast<double>((lost > 0) == (sum > 0) ? bits + 1 : bits - 1);
}

/// To fp32, to odd as above.
inline float RoundToOdd(double value) {
  const auto rounded = static_cast<float>(value);
  const auto bits = std::bit_cast<uint32_t>(rounded);
  const double back = static_cast<double>(rounded);
  if (!std::isfinite(rounded) || back == value || (bits & 1u) != 0) return rounded;
  if (rounded == 0.0f) return std::bit_cast<float>(bits | 1u);
  return std::bit_cast<float>(std::abs(back) < std::abs(value) ? bits + 1 : bits - 1);
}

inline uint16_t FmaBf16(uint16_t a, uint16_t b, uint16_t c) {
  using marlin::Bf16ToFloat;
  return marlin::FloatToBf16(RoundToOdd(ExactFma(Bf16ToFloat(a), Bf16ToFloat(b), Bf16ToFloat(c))));
}
inline uint16_t FmaHalf(uint16_t a, uint16_t b, uint16_t c) {
  using marlin::HalfToFloat;
  return marlin::FloatToHalf(RoundToOdd(ExactFma(HalfToFloat(a), HalfToFloat(b), HalfToFloat(c))));
}

/// compute(half of a, of b, ...) for both halves.
template <typename Compute, typename... Pairs>
uint32_t ByHalves(const Compute& compute, Pairs... pairs) {
  const uint32_t low = compute(static_cast<uint16_t>(pairs)...);
  const uint32_t high = compute(static_cast<uint16_t>(pairs >> 16)...);
  return low | high << 16;
}

}  // namespace cuda_emulation

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __align__(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
struct __half {
  uint16_t bits;
};
using half = __half;
struct __align__(4) __half2 {
  __half x, y;
};
struct __half_raw {
  unsigned short x;
};
struct __half2_raw {
  unsigned short x, y;
};

inline float __bfloat162float(__nv_bfloat16 x) { return marlin::Bf16ToFloat(x.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {marlin::FloatToBf16(x)}; }
inline __nv_bfloat16 __float2bfloat16(float x) { return {marlin::FloatToBf16(x)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) {
  return {__bfloat162float(x.x), __bfloat162float(x.y)};
}
inline float __half2float(__half x) { return marlin::HalfToFloat(x.bits); }
inline __half __float2half_rn(float x) { return {marlin::FloatToHalf(x)}; }
inline __half __float2half(float x) { return {marlin::FloatToHalf(x)}; }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

using __nv_fp8x2_storage_t = unsigned short;
using __nv_fp8_storage_t = unsigned char;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t,
                                                     __nv_fp8_interpretation_t) {
  return static_cast<unsigned short>(marlin::FloatToFp8E4M3(x.x) | marlin::FloatToFp8E4M3(x.y)
                                                                       << 8);
}
inline __nv_fp8x2_storage_t __nv_cvt_halfraw2_to_fp8x2(__half2_raw x, __nv_saturation_t saturation,
                                                       __nv_fp8_interpretation_t as) {
  return __nv_cvt_float2_to_fp8x2({marlin::HalfToFloat(x.x), marlin::HalfToFloat(x.y)}, saturation,
                                  as);
}
inline __half2_raw __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t codes,
                                              __nv_fp8_interpretation_t) {
  const auto half_of = [](int code) {
    return marlin::FloatToHalf(marlin::Fp8E4M3ToFloat(static_cast<uint8_t>(code)));
  };
  return {half_of(codes & 255), half_of(codes >> 8)};
}
