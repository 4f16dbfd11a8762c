// The vector operations of simd_avx512.h on NEON, which every 64-bit Arm processor has.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "backends/cpu/simd/expansion.h"

#define MARLIN_SIMD_INLINE static inline __attribute__((always_inline))

namespace marlin::cpu::neon {

using F = float32x4_t;
using I = uint32x4_t;

inline constexpr int kLanes = 4;
inline constexpr int kPanelRows = 4;  ///< 4 x 4 accumulators, 8 loads per 16 FMAs, 32 registers.
inline constexpr int kPanelM = 4;
inline constexpr int kPanelColumns = kPanelRows;
inline constexpr int kPanelK = 1024;
inline constexpr int kLeastFused = 1;
inline constexpr int kFusedRows = 8;  ///< See exact_kernel.inl.h.
inline constexpr int kDots = 16;
inline constexpr bool kLooksUpBytes = false;  ///< See simd_avx512.h.

/// Stops the compiler from folding a load into each of its uses, which costs a load port per use.
MARLIN_SIMD_INLINE F KeepInRegister(F v) {
  asm("" : "+w"(v));
  return v;
}
MARLIN_SIMD_INLINE F Zero() { return vdupq_n_f32(0.0f); }
MARLIN_SIMD_INLINE F Set(float x) { return vdupq_n_f32(x); }
MARLIN_SIMD_INLINE F Load(const float* p) { return vld1q_f32(p); }
MARLIN_SIMD_INLINE void Store(float* p, F v) { vst1q_f32(p, v); }
MARLIN_SIMD_INLINE F Add(F a, F b) { return vaddq_f32(a, b); }
MARLIN_SIMD_INLINE F Sub(F a, F b) { return vsubq_f32(a, b); }
MARLIN_SIMD_INLINE F Mul(F a, F b) { return vmulq_f32(a, b); }
MARLIN_SIMD_INLINE F Div(F a, F b) { return vdivq_f32(a, b); }
MARLIN_SIMD_INLINE F Fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
MARLIN_SIMD_INLINE F Max(F a, F b) { return vmaxq_f32(a, b); }
MARLIN_SIMD_INLINE F SplitSet(float a, float b, int part) { return Set(part < 2 ? a : b); }

MARLIN_SIMD_INLINE I LoadWords(const void* p) {
  return vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(p)));
}
MARLIN_SIMD_INLINE I SetWord(uint32_t x) { return vdupq_n_u32(x); }
template <int kBits>
MARLIN_SIMD_INLINE I ShiftRight(I v) {
  if constexpr (kBits == 0) {
    return v;
  } else {
    return vshrq_n_u32(v, kBits);
  }
}
template <int kBits>
MARLIN_SIMD_INLINE I ShiftLeft(I v) {
  return vshlq_n_u32(v, kBits);
}
template <int kBits>
MARLIN_SIMD_INLINE I ShiftRightSigned(I v) {
  return vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(v), kBits));
}
MARLIN_SIMD_INLINE I And(I a, I b) { return vandq_u32(a, b); }
MARLIN_SIMD_INLINE I Or(I a, I b) { return vorrq_u32(a, b); }
MARLIN_SIMD_INLINE I OrAnd(I a, I b, I c) { return Or(a, And(b, c)); }
MARLIN_SIMD_INLINE I SelectBits(I mask, I a, I b) { return vbslq_u32(mask, a, b); }
MARLIN_SIMD_INLINE I AddWords(I a, I b) { return vaddq_u32(a, b); }
MARLIN_SIMD_INLINE F ToFloat(I v) { return vcvtq_f32_s32(vreinterpretq_s32_u32(v)); }
MARLIN_SIMD_INLINE F AsFloat(I v) { return vreinterpretq_f32_u32(v); }
MARLIN_SIMD_INLINE I AsWords(F v) { return vreinterpretq_u32_f32(v); }
MARLIN_SIMD_INLINE F SelectZero(I bits, I mask, F a, F b) {
  return vbslq_f32(vtstq_u32(bits, mask), b, a);
}
MARLIN_SIMD_INLINE F HalfToFloat(I v) { return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(v))); }
MARLIN_SIMD_INLINE F Gather(const float* table, I index) {
  const float values[kLanes] = {table[vgetq_lane_u32(index, 0)], table[vgetq_lane_u32(index, 1)],
                                table[vgetq_lane_u32(index, 2)], table[vgetq_lane_u32(index, 3)]};
  return Load(values);
}

struct Table {
  F part[4];  ///< Indices 0..3, 4..7, 8..11, 12..15: the 64-byte table of one TBL.
};
MARLIN_SIMD_INLINE Table LoadTable(const float* p) {
  return {{Load(p), Load(p + 4), Load(p + 8), Load(p + 12)}};
}
template <int kBits>
MARLIN_SIMD_INLINE F Lookup(const Table& t, I index) {
  // Byte indices of entry i: 4 i, 4 i + 1, 4 i + 2, 4 i + 3.
  const I low = And(index, SetWord(15));
  const I bytes = vmlaq_u32(SetWord(0x03020100), low, SetWord(0x04040404));
  const uint8x16x4_t table = {{vreinterpretq_u8_f32(t.part[0]), vreinterpretq_u8_f32(t.part[1]),
                               vreinterpretq_u8_f32(t.part[2]), vreinterpretq_u8_f32(t.part[3])}};
  return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(bytes)));
}
MARLIN_SIMD_INLINE Table SubTable(Table t, F x) {
  for (F& part : t.part) part = Sub(part, x);
  return t;
}
MARLIN_SIMD_INLINE Table MulTable(Table t, F x) {
  for (F& part : t.part) part = Mul(part, x);
  return t;
}
MARLIN_SIMD_INLINE Table AddTable(Table t, F x) {
  for (F& part : t.part) part = Add(part, x);
  return t;
}

MARLIN_SIMD_INLINE float Sum(F v) { return vaddvq_f32(v); }
MARLIN_SIMD_INLINE float Largest(F v) { return vmaxvq_f32(v); }
MARLIN_SIMD_INLINE F SumEach(const F (&v)[kLanes]) {
  return vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]));
}

MARLIN_SIMD_INLINE F LoadHalf(const uint16_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
MARLIN_SIMD_INLINE F LoadBf16(const uint16_t* p) { return AsFloat(vshll_n_u16(vld1_u16(p), 16)); }
MARLIN_SIMD_INLINE F LoadBytes(const uint8_t* p) {
  uint32_t bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  return AsFloat(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes)))));
}
MARLIN_SIMD_INLINE void StoreHalf(uint16_t* p, F v) {
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v)));
}
MARLIN_SIMD_INLINE void StoreBf16(uint16_t* p, F v) {
  const I bits = AsWords(v);
  const I odd = And(ShiftRight<16>(bits), SetWord(1));
  const I rounded = ShiftRight<16>(AddWords(bits, AddWords(odd, SetWord(0x7fff))));
  const I quiet = Or(ShiftRight<16>(bits), SetWord(0x40));
  vst1_u16(p, vmovn_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet)));
}
MARLIN_SIMD_INLINE void StoreDeinterleaved(float* out, const float* in) {
  for (int i = 0; i < 4; ++i) {
    const float32x4x2_t pairs = vld2q_f32(in + 8 * i);
    Store(out + 4 * i, pairs.val[0]);
    Store(out + 16 + 4 * i, pairs.val[1]);
  }
}
MARLIN_SIMD_INLINE void Prefetch(const void* p) { __builtin_prefetch(p); }

/// Part of a row of 2:4 panels (panels.h), expanded as in simd_avx512.h: 8 k at a time by byte
/// permutations, whose patterns come from a table.
MARLIN_SIMD_INLINE I ExpandKept(const uint8_t* kept, const uint8_t* metadata, int part) {
  // The codes of 8 k and of those 64 later.
  const auto expand = [&](int eighth) {
    uint32_t packed;
    std::memcpy(&packed, kept + 4 * eighth, sizeof(packed));
    const uint8x8_t bytes = vcreate_u8(packed);
    const auto of_half = [&](int half) {
      return vtbl1_u8(bytes, vcreate_u8(kExpansions.bytes[metadata[8 * half + eighth]]));
    };
    return vbsl_u8(vdup_n_u8(0x0f), of_half(0), of_half(1));
  };
  const uint8x8x2_t words = vzip_u8(expand(part), expand(4 + part));
  return vreinterpretq_u32_u8(vcombine_u8(words.val[0], words.val[1]));
}

}  // namespace marlin::cpu::neon
