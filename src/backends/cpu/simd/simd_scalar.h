// The vector operations of simd_avx512.h with one lane, in portable C++.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "backends/cpu/simd/expansion.h"
#include "base/scalars.h"

#define MARLIN_SIMD_INLINE static inline

namespace marlin::cpu::scalar {

using F = float;
using I = uint32_t;

inline constexpr int kLanes = 1;
inline constexpr int kPanelRows = 4;
inline constexpr int kPanelM = 3;
inline constexpr int kPanelColumns = kPanelRows;
inline constexpr int kPanelK = 1024;
inline constexpr int kLeastFused = 1;
inline constexpr int kFusedRows = 4;  ///< See exact_kernel.inl.h.
inline constexpr int kDots = 4;
inline constexpr bool kLooksUpBytes = false;  ///< See simd_avx512.h.

MARLIN_SIMD_INLINE F KeepInRegister(F v) { return v; }
MARLIN_SIMD_INLINE F Zero() { return 0.0f; }
MARLIN_SIMD_INLINE F Set(float x) { return x; }
MARLIN_SIMD_INLINE F Load(const float* p) { return *p; }
MARLIN_SIMD_INLINE void Store(float* p, F v) { *p = v; }
MARLIN_SIMD_INLINE F Add(F a, F b) { return a + b; }
MARLIN_SIMD_INLINE F Sub(F a, F b) { return a - b; }
MARLIN_SIMD_INLINE F Mul(F a, F b) { return a * b; }
MARLIN_SIMD_INLINE F Div(F a, F b) { return a / b; }
MARLIN_SIMD_INLINE F Fma(F a, F b, F c) { return a * b + c; }
MARLIN_SIMD_INLINE F Max(F a, F b) { return a > b ? a : b; }
MARLIN_SIMD_INLINE F SplitSet(float a, float b, int part) { return part < 8 ? a : b; }

MARLIN_SIMD_INLINE I LoadWords(const void* p) {
  I word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}
MARLIN_SIMD_INLINE I SetWord(uint32_t x) { return x; }
template <int kBits>
MARLIN_SIMD_INLINE I ShiftRight(I v) {
  return v >> kBits;
}
template <int kBits>
MARLIN_SIMD_INLINE I ShiftLeft(I v) {
  return v << kBits;
}
template <int kBits>
MARLIN_SIMD_INLINE I ShiftRightSigned(I v) {
  return static_cast<I>(static_cast<int32_t>(v) >> kBits);
}
MARLIN_SIMD_INLINE I And(I a, I b) { return a & b; }
MARLIN_SIMD_INLINE I Or(I a, I b) { return a | b; }
MARLIN_SIMD_INLINE I OrAnd(I a, I b, I c) { return a | (b & c); }
MARLIN_SIMD_INLINE I SelectBits(I mask, I a, I b) { return (mask & a) | (~mask & b); }
MARLIN_SIMD_INLINE I AddWords(I a, I b) { return a + b; }
MARLIN_SIMD_INLINE F ToFloat(I v) { return static_cast<float>(static_cast<int32_t>(v)); }
MARLIN_SIMD_INLINE F AsFloat(I v) { return std::bit_cast<float>(v); }
MARLIN_SIMD_INLINE I AsWords(F v) { return std::bit_cast<uint32_t>(v); }
MARLIN_SIMD_INLINE F SelectZero(I bits, I mask, F a, F b) { return (bits & mask) == 0 ? a : b; }
MARLIN_SIMD_INLINE F HalfToFloat(I v) { return marlin::HalfToFloat(static_cast<uint16_t>(v)); }
MARLIN_SIMD_INLINE F Gather(const float* table, I index) { return table[index]; }

struct Table {
  float values[16];
};
MARLIN_SIMD_INLINE Table LoadTable(const float* p) {
  Table t;
  std::memcpy(t.values, p, sizeof(t.values));
  return t;
}
template <int kBits>
MARLIN_SIMD_INLINE F Lookup(const Table& t, I index) {
  return t.values[index & 15u];
}
MARLIN_SIMD_INLINE Table SubTable(Table t, F x) {
  for (float& value : t.values) value -= x;
  return t;
}
MARLIN_SIMD_INLINE Table MulTable(Table t, F x) {
  for (float& value : t.values) value *= x;
  return t;
}
MARLIN_SIMD_INLINE Table AddTable(Table t, F x) {
  for (float& value : t.values) value += x;
  return t;
}

MARLIN_SIMD_INLINE float Sum(F v) { return v; }
MARLIN_SIMD_INLINE float Largest(F v) { return v; }
MARLIN_SIMD_INLINE F SumEach(const F (&v)[kLanes]) { return v[0]; }
MARLIN_SIMD_INLINE F LoadHalf(const uint16_t* p) { return marlin::HalfToFloat(*p); }
MARLIN_SIMD_INLINE F LoadBf16(const uint16_t* p) { return Bf16ToFloat(*p); }
MARLIN_SIMD_INLINE F LoadBytes(const uint8_t* p) { return AsFloat(*p); }
MARLIN_SIMD_INLINE void StoreHalf(uint16_t* p, F v) { *p = FloatToHalf(v); }
MARLIN_SIMD_INLINE void StoreBf16(uint16_t* p, F v) { *p = FloatToBf16(v); }
MARLIN_SIMD_INLINE void StoreDeinterleaved(float* out, const float* in) {
  for (int i = 0; i < 16; ++i) {
    out[i] = in[2 * i];
    out[16 + i] = in[2 * i + 1];
  }
}
MARLIN_SIMD_INLINE void Prefetch(const void* /*p*/) {}

/// Part of a row of 2:4 panels (panels.h), expanded as in simd_avx512.h.
MARLIN_SIMD_INLINE I ExpandKept(const uint8_t* kept, const uint8_t* metadata, int part) {
  // The codes of k and k + 64.
  const auto codes = [&](int k) {
    const int eighth = k / 8;
    const auto code = [&](int half) {
      const uint64_t from = kExpansions.bytes[metadata[8 * half + eighth]] >> (8 * (k % 8)) & 0xff;
      return from < 4 ? static_cast<I>(kept[4 * eighth + static_cast<int>(from)]) : 0u;
    };
    return (code(0) & 0x0fu) | (code(1) & 0xf0u);
  };
  const int k = 2 * part;
  return codes(k) | codes(k + 32) << 8 | codes(k + 1) << 16 | codes(k + 33) << 24;
}

}  // namespace marlin::cpu::scalar
