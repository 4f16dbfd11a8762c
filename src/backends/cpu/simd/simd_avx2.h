// The vector operations of simd_avx512.h on AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "backends/cpu/pack/panels.h"
#include "backends/cpu/simd/expansion.h"

#define MARLIN_SIMD_INLINE static inline __attribute__((always_inline))

namespace marlin::cpu::avx2 {

using F = __m256;
using I = __m256i;

inline constexpr int kLanes = 8;
inline constexpr int kPanelRows = 4;  ///< 4 x 3 accumulators, 7 loads per 12 FMAs.
inline constexpr int kPanelM = 3;
inline constexpr int kPanelColumns = 16;  ///< 16 columns x 256 k: half of L1.
inline constexpr int kPanelK = 256;
/// Fewer rows have fewer chains of FMAs than hide their latency.
inline constexpr int kLeastFused = 3;
inline constexpr int kFusedRows = 8;  ///< See exact_kernel.inl.h.
inline constexpr int kDots = 8;
inline constexpr bool kLooksUpBytes = false;  ///< See simd_avx512.h.

/// Stops the compiler from folding a load into each of its uses, which costs a load port per use.
MARLIN_SIMD_INLINE F KeepInRegister(F v) {
  asm("" : "+x"(v));
  return v;
}
MARLIN_SIMD_INLINE F Zero() { return _mm256_setzero_ps(); }
MARLIN_SIMD_INLINE F Set(float x) { return _mm256_set1_ps(x); }
MARLIN_SIMD_INLINE F Load(const float* p) { return _mm256_loadu_ps(p); }
MARLIN_SIMD_INLINE void Store(float* p, F v) { _mm256_storeu_ps(p, v); }
MARLIN_SIMD_INLINE F Add(F a, F b) { return _mm256_add_ps(a, b); }
MARLIN_SIMD_INLINE F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
MARLIN_SIMD_INLINE F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
MARLIN_SIMD_INLINE F Div(F a, F b) { return _mm256_div_ps(a, b); }
MARLIN_SIMD_INLINE F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
MARLIN_SIMD_INLINE F Max(F a, F b) { return _mm256_max_ps(a, b); }
MARLIN_SIMD_INLINE F SplitSet(float a, float b, int part) { return Set(part == 0 ? a : b); }

MARLIN_SIMD_INLINE I LoadWords(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
MARLIN_SIMD_INLINE I SetWord(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
template <int kBits>
MARLIN_SIMD_INLINE I ShiftRight(I v) {
  if constexpr (kBits == 0) return v;
  return _mm256_srli_epi32(v, kBits);
}
template <int kBits>
MARLIN_SIMD_INLINE I ShiftLeft(I v) {
  if constexpr (kBits == 0) return v;
  return _mm256_slli_epi32(v, kBits);
}
template <int kBits>
MARLIN_SIMD_INLINE I ShiftRightSigned(I v) {
  return _mm256_srai_epi32(v, kBits);
}
MARLIN_SIMD_INLINE I And(I a, I b) { return _mm256_and_si256(a, b); }
MARLIN_SIMD_INLINE I Or(I a, I b) { return _mm256_or_si256(a, b); }
MARLIN_SIMD_INLINE I OrAnd(I a, I b, I c) { return Or(a, And(b, c)); }
MARLIN_SIMD_INLINE I SelectBits(I mask, I a, I b) {
  return Or(And(mask, a), _mm256_andnot_si256(mask, b));
}
MARLIN_SIMD_INLINE I AddWords(I a, I b) { return _mm256_add_epi32(a, b); }
MARLIN_SIMD_INLINE F ToFloat(I v) { return _mm256_cvtepi32_ps(v); }
MARLIN_SIMD_INLINE F AsFloat(I v) { return _mm256_castsi256_ps(v); }
MARLIN_SIMD_INLINE I AsWords(F v) { return _mm256_castps_si256(v); }
MARLIN_SIMD_INLINE F SelectZero(I bits, I mask, F a, F b) {
  const I zero = _mm256_cmpeq_epi32(And(bits, mask), _mm256_setzero_si256());
  return _mm256_blendv_ps(b, a, AsFloat(zero));
}
/// Packs the low 16 bits of every word together.
MARLIN_SIMD_INLINE __m128i NarrowWords(I v) {
  const I low = And(v, SetWord(0xffff));
  const I packed = _mm256_packus_epi32(low, low);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
MARLIN_SIMD_INLINE F HalfToFloat(I v) { return _mm256_cvtph_ps(NarrowWords(v)); }
MARLIN_SIMD_INLINE F Gather(const float* table, I index) {
  return _mm256_i32gather_ps(table, index, 4);
}

struct Table {
  F low;   ///< Indices 0..7.
  F high;  ///< Indices 8..15.
};
MARLIN_SIMD_INLINE Table LoadTable(const float* p) { return {Load(p), Load(p + 8)}; }
template <int kBits>
MARLIN_SIMD_INLINE F Lookup(Table t, I index) {
  if constexpr (kBits <= 3) return _mm256_permutevar8x32_ps(t.low, index);
  // permutevar8x32 uses three index bits; the fourth, shifted to the sign bit, selects the half.
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(t.low, index),
                          _mm256_permutevar8x32_ps(t.high, index), AsFloat(ShiftLeft<28>(index)));
}
MARLIN_SIMD_INLINE Table SubTable(Table t, F x) { return {Sub(t.low, x), Sub(t.high, x)}; }
MARLIN_SIMD_INLINE Table MulTable(Table t, F x) { return {Mul(t.low, x), Mul(t.high, x)}; }
MARLIN_SIMD_INLINE Table AddTable(Table t, F x) { return {Add(t.low, x), Add(t.high, x)}; }

MARLIN_SIMD_INLINE float Sum(F v) {
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
MARLIN_SIMD_INLINE float Largest(F v) {
  const __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 pair = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}
MARLIN_SIMD_INLINE F SumEach(const F (&v)[kLanes]) {
  F pairs[4];
  for (int i = 0; i < 4; ++i) {
    pairs[i] =
        Add(_mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  }
  F fours[2];
  for (int i = 0; i < 2; ++i) {
    const __m256d a = _mm256_castps_pd(pairs[2 * i]);
    const __m256d b = _mm256_castps_pd(pairs[2 * i + 1]);
    fours[i] =
        Add(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
  }
  return Add(_mm256_permute2f128_ps(fours[0], fours[1], 0x20),
             _mm256_permute2f128_ps(fours[0], fours[1], 0x31));
}

MARLIN_SIMD_INLINE F LoadHalf(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
MARLIN_SIMD_INLINE F LoadBf16(const uint16_t* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return AsFloat(ShiftLeft<16>(_mm256_cvtepu16_epi32(bits)));
}
MARLIN_SIMD_INLINE F LoadBytes(const uint8_t* p) {
  return AsFloat(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
MARLIN_SIMD_INLINE void StoreHalf(uint16_t* p, F v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
MARLIN_SIMD_INLINE void StoreBf16(uint16_t* p, F v) {
  const I bits = AsWords(v);
  const I odd = And(ShiftRight<16>(bits), SetWord(1));
  const I rounded = ShiftRight<16>(AddWords(bits, AddWords(odd, SetWord(0x7fff))));
  const I quiet = Or(ShiftRight<16>(bits), SetWord(0x40));
  const F nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
  const F chosen = _mm256_blendv_ps(AsFloat(rounded), AsFloat(quiet), nan);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), NarrowWords(AsWords(chosen)));
}
MARLIN_SIMD_INLINE void StoreDeinterleaved(float* out, const float* in) {
  for (int i = 0; i < 2; ++i) {
    const F low = Load(in + 16 * i);
    const F high = Load(in + 16 * i + 8);
    const F even = _mm256_shuffle_ps(low, high, 0x88);
    const F odd = _mm256_shuffle_ps(low, high, 0xdd);
    Store(out + 8 * i, _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(even), 0xd8)));
    Store(out + 16 + 8 * i, _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(odd), 0xd8)));
  }
}
MARLIN_SIMD_INLINE void Prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

/// Part of a row of 2:4 panels (panels.h), expanded as in simd_avx512.h: 8 k at a time by byte
/// permutations, whose patterns come from a table.
MARLIN_SIMD_INLINE I ExpandKept(const uint8_t* kept, const uint8_t* metadata, int part) {
  const auto load = [](const uint8_t* p) __attribute__((always_inline)) {
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  };
  // Low half: 16 k from 16 part on; high half: those 32 later.
  const I packed = _mm256_set_m128i(load(kept + 16 + 8 * part), load(kept + 8 * part));
  const I odd = _mm256_set_epi64x(0x0404040404040404, 0, 0x0404040404040404, 0);
  const auto expand = [&](const uint8_t* nibbles) __attribute__((always_inline)) {
    const auto pattern = [nibbles](int i) __attribute__((always_inline)) {
      return static_cast<long long>(kExpansions.bytes[nibbles[i]]);
    };
    const I patterns = _mm256_set_epi64x(pattern(5), pattern(4), pattern(1), pattern(0));
    return _mm256_shuffle_epi8(packed, Or(patterns, odd));
  };
  const I low_nibbles = SetWord(0x0f0f0f0f);
  const I codes =
      Or(And(expand(metadata + 2 * part), low_nibbles),
         _mm256_andnot_si256(low_nibbles, expand(metadata + kMetadataBytes / 2 + 2 * part)));
  const __m128i low = _mm256_castsi256_si128(codes);
  const __m128i high = _mm256_extracti128_si256(codes, 1);
  return _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
}

}  // namespace marlin::cpu::avx2
