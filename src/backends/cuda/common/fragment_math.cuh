// The 16-bit arithmetic of fragments: pairs of bf16 or fp16 numbers in 32-bit registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "backends/cuda/common/device_code.cuh"

#define MARLIN_DEVICE __device__ __forceinline__

namespace marlin::cuda {

template <uint32_t kTruth>
MARLIN_DEVICE uint32_t Lop3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(kTruth));
  return d;
}
/// (a & b) | c in one instruction.
MARLIN_DEVICE uint32_t AndOr(uint32_t a, uint32_t b, uint32_t c) { return Lop3<0xea>(a, b, c); }

/// Numbers of 8 significant bits with the range of fp32.
struct Bf16x2 {
  static constexpr bool kIsBf16 = true;
  using Scalar = __nv_bfloat16;
  /// 2^7 in both halves: with a nibble in the low bits, a half is 128 + nibble.
  static constexpr uint32_t kMagic = 0x43004300u;

  static MARLIN_DEVICE uint32_t Fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
  static MARLIN_DEVICE uint32_t Multiply(uint32_t a, uint32_t b) {
    if constexpr (kHasTma) {
      uint32_t d;
      asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
      return d;
    } else {
      return Fma(a, b, 0x80008000u);  // -0, which changes no product.
    }
  }
  static MARLIN_DEVICE uint32_t Subtract(uint32_t a, uint32_t b) {
    if constexpr (kHasTma) {
      uint32_t d;
      asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
      return d;
    } else {
      return Fma(b, 0xbf80bf80u, a);
    }
  }
  /// Rounds two floats; the first goes to the low half.
  static MARLIN_DEVICE uint32_t Pack(float low, float high) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
  }
  static MARLIN_DEVICE float2 Unpack(uint32_t pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
};

/// Numbers of 11 significant bits up to 65504.
struct F16x2 {
  static constexpr bool kIsBf16 = false;
  using Scalar = __half;
  /// 2^10 in both halves: with a byte in the low bits, a half is 1024 + byte.
  static constexpr uint32_t kMagic = 0x64006400u;

  static MARLIN_DEVICE uint32_t Fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
  static MARLIN_DEVICE uint32_t Multiply(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }
  static MARLIN_DEVICE uint32_t Subtract(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }
  static MARLIN_DEVICE uint32_t Pack(float low, float high) {
    uint32_t d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
  }
  static MARLIN_DEVICE float2 Unpack(uint32_t pair) {
    const __half2 halves = *reinterpret_cast<const __half2*>(&pair);
    return __half22float2(halves);
  }
};

/// Four numbers of 4 significant bits up to 448, of 8 bits each.
struct E4M3x4 {
  /// Rounds two numbers into the low half, the first into its low byte; saturates to 448.
  static MARLIN_DEVICE uint32_t FromF16(uint32_t pair) {
    uint16_t d;
    if constexpr (kHasFp8) {
      asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(d) : "r"(pair));
    } else {
      const __half2_raw halves = {static_cast<unsigned short>(pair),
                                  static_cast<unsigned short>(pair >> 16)};
      d = __nv_cvt_halfraw2_to_fp8x2(halves, __NV_SATFINITE, __NV_E4M3);
    }
    return d;
  }
  static MARLIN_DEVICE uint32_t FromFloats(float low, float high) {
    uint16_t d;
    if constexpr (kHasFp8) {
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
    } else {
      d = __nv_cvt_float2_to_fp8x2(float2{low, high}, __NV_SATFINITE, __NV_E4M3);
    }
    return d;
  }
  /// Two numbers, the first in the low byte, as fp16: exact.
  static MARLIN_DEVICE uint32_t ToF16(uint16_t codes) {
    uint32_t halves;
    if constexpr (kHasFp8) {
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    } else {
      // Moved to the fields of fp16, a code is its number times 2^-8. The largest code is NaN.
      const uint32_t bytes = __byte_perm(codes, 0, 0x1404);
      const uint32_t fields = (bytes & 0x80008000u) | (bytes & 0x7f007f00u) >> 1;
      const uint32_t is_nan = __vcmpeq2(fields & 0x7fff7fffu, 0x3f803f80u);
      constexpr uint32_t kTwo8 = 0x5c005c00u;
      halves = F16x2::Multiply(fields, kTwo8) | (is_nan & 0x7fff7fffu);
    }
    return halves;
  }
};

/// The low or the high half of a pair in both halves.
MARLIN_DEVICE uint32_t SpreadLow(uint32_t pair) { return __byte_perm(pair, 0, 0x1010); }
MARLIN_DEVICE uint32_t SpreadHigh(uint32_t pair) { return __byte_perm(pair, 0, 0x3232); }

/// 2^exponent, for -126 <= exponent <= 127.
MARLIN_DEVICE constexpr float PowerOfTwo(int exponent) {
  float value = 1.0f;
  for (int i = 0; i < exponent; ++i) value *= 2.0f;
  for (int i = 0; i > exponent; --i) value *= 0.5f;
  return value;
}

}  // namespace marlin::cuda
