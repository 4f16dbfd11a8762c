// The 16-bit arithmetic of fragments: pairs of bf16 or fp16 numbers in 32-bit registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

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
    uint32_t d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }
  static MARLIN_DEVICE uint32_t Subtract(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
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
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(d) : "r"(pair));
    return d;
  }
  static MARLIN_DEVICE uint32_t FromFloats(float low, float high) {
    uint16_t d;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
    return d;
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
