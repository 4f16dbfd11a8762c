// The vector operations of the CPU kernels, on AVX-512. Every simd_*.h defines the same names in
// its own namespace, so that no inline function is shared between instruction sets.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "backends/cpu/simd/e4m3_numbers.h"

#define MARLIN_SIMD_INLINE static inline __attribute__((always_inline))

namespace marlin::cpu::avx512 {

using F = __m512;   ///< kLanes floats.
using I = __m512i;  ///< kLanes 32-bit words.

inline constexpr int kLanes = 16;
inline constexpr int kPanelRows = 8;  ///< 8 x 3 accumulators, 11 loads per 24 FMAs.
inline constexpr int kPanelM = 3;
inline constexpr int kPanelColumns = kPanelRows;
inline constexpr int kPanelK = 1024;
inline constexpr int kLeastFused = 1;
inline constexpr int kFusedRows = 8;  ///< See exact_kernel.inl.h.
inline constexpr int kDots = 16;      ///< Accumulators of an attention tile.

/// Stops the compiler from folding a load into each of its uses, which costs a load port per use.
MARLIN_SIMD_INLINE F KeepInRegister(F v) {
  asm("" : "+v"(v));
  return v;
}
MARLIN_SIMD_INLINE F Zero() { return _mm512_setzero_ps(); }
MARLIN_SIMD_INLINE F Set(float x) { return _mm512_set1_ps(x); }
MARLIN_SIMD_INLINE F Load(const float* p) { return _mm512_loadu_ps(p); }
MARLIN_SIMD_INLINE void Store(float* p, F v) { _mm512_storeu_ps(p, v); }
MARLIN_SIMD_INLINE F Add(F a, F b) { return _mm512_add_ps(a, b); }
MARLIN_SIMD_INLINE F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
MARLIN_SIMD_INLINE F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
MARLIN_SIMD_INLINE F Div(F a, F b) { return _mm512_div_ps(a, b); }
MARLIN_SIMD_INLINE F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
/// Lane-wise maximum; NaN if b is NaN.
MARLIN_SIMD_INLINE F Max(F a, F b) { return _mm512_max_ps(a, b); }
/// Broadcasts a to lanes 0..7 and b to lanes 8..15 of 16; returns vector `part` of these.
MARLIN_SIMD_INLINE F SplitSet(float a, float b, int /*part*/) {
  return _mm512_mask_broadcastss_ps(_mm512_set1_ps(a), 0xff00, _mm_set_ss(b));
}

MARLIN_SIMD_INLINE I LoadWords(const void* p) { return _mm512_loadu_si512(p); }
MARLIN_SIMD_INLINE I SetWord(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
template <int kBits>
MARLIN_SIMD_INLINE I ShiftRight(I v) {
  if constexpr (kBits == 0) return v;
  return _mm512_srli_epi32(v, kBits);
}
template <int kBits>
MARLIN_SIMD_INLINE I ShiftLeft(I v) {
  if constexpr (kBits == 0) return v;
  return _mm512_slli_epi32(v, kBits);
}
template <int kBits>
MARLIN_SIMD_INLINE I ShiftRightSigned(I v) {
  return _mm512_srai_epi32(v, kBits);
}
MARLIN_SIMD_INLINE I And(I a, I b) { return _mm512_and_si512(a, b); }
MARLIN_SIMD_INLINE I Or(I a, I b) { return _mm512_or_si512(a, b); }
/// a | (b & c).
MARLIN_SIMD_INLINE I OrAnd(I a, I b, I c) { return _mm512_ternarylogic_epi32(a, b, c, 0xf8); }
/// The bits of a where the mask is set, of b elsewhere.
MARLIN_SIMD_INLINE I SelectBits(I mask, I a, I b) {
  return _mm512_ternarylogic_epi32(mask, a, b, 0xca);
}
MARLIN_SIMD_INLINE I AddWords(I a, I b) { return _mm512_add_epi32(a, b); }
MARLIN_SIMD_INLINE F ToFloat(I v) { return _mm512_cvtepi32_ps(v); }
MARLIN_SIMD_INLINE F AsFloat(I v) { return _mm512_castsi512_ps(v); }
MARLIN_SIMD_INLINE I AsWords(F v) { return _mm512_castps_si512(v); }
/// Lanes of a where `bits & mask` is zero, otherwise of b.
MARLIN_SIMD_INLINE F SelectZero(I bits, I mask, F a, F b) {
  return _mm512_mask_blend_ps(_mm512_test_epi32_mask(bits, mask), a, b);
}
/// The low 16 bits of every word as fp16.
MARLIN_SIMD_INLINE F HalfToFloat(I v) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v)); }
MARLIN_SIMD_INLINE F Gather(const float* table, I index) {
  return _mm512_i32gather_ps(index, table, 4);
}

/// A lookup table of 16 floats for codes of kBits; the bits of an index above a code are ignored.
struct Table {
  F values;
};
MARLIN_SIMD_INLINE Table LoadTable(const float* p) { return {Load(p)}; }
template <int kBits>
MARLIN_SIMD_INLINE F Lookup(Table t, I index) {
  return _mm512_permutexvar_ps(index, t.values);
}
MARLIN_SIMD_INLINE Table SubTable(Table t, F x) { return {Sub(t.values, x)}; }
MARLIN_SIMD_INLINE Table MulTable(Table t, F x) { return {Mul(t.values, x)}; }
MARLIN_SIMD_INLINE Table AddTable(Table t, F x) { return {Add(t.values, x)}; }

/// Replaces the words of a vector, each the sign and magnitude of two 8-bit numbers, with the
/// 16-bit numbers of their low bytes; `second` receives the high bytes. `high` and `low`
/// are the bytes of 128 numbers without sign, aligned to 64.
inline constexpr bool kLooksUpBytes = true;
MARLIN_SIMD_INLINE void LookUpBytes(const uint8_t* high, const uint8_t* low, I& words, I& second) {
  constexpr int kOrAnd = 0xf8;  // a | (b & c)
  const I unsigned_high =
      _mm512_permutex2var_epi8(_mm512_load_si512(high), words, _mm512_load_si512(high + 64));
  const I lows =
      _mm512_permutex2var_epi8(_mm512_load_si512(low), words, _mm512_load_si512(low + 64));
  const I highs = _mm512_ternarylogic_epi32(unsigned_high, words, _mm512_set1_epi8(-128), kOrAnd);
  words = _mm512_ternarylogic_epi32(_mm512_slli_epi16(highs, 8), lows, _mm512_set1_epi16(0x00ff),
                                    kOrAnd);
  second = _mm512_ternarylogic_epi32(_mm512_srli_epi16(lows, 8), highs,
                                     _mm512_set1_epi16(static_cast<int16_t>(0xff00)), kOrAnd);
}

/// Widens 64 e4m3 codes to fp32.
MARLIN_SIMD_INLINE void WidenCodes(const uint8_t* from, float* to) {
  // The upper half of number i is word i / 2 of the even codes or, from 32 on, of the odd ones.
  alignas(64) static constexpr uint16_t kFirst[32] = {0,  0,  0, 32, 0,  1,  0, 33, 0,  2, 0,
                                                      34, 0,  3, 0,  35, 0,  4, 0,  36, 0, 5,
                                                      0,  37, 0, 6,  0,  38, 0, 7,  0,  39};
  I even = LoadWords(from);
  I odd;
  LookUpBytes(kE4M3Numbers.high, kE4M3Numbers.low, even, odd);
  I order = _mm512_load_si512(kFirst);
  for (int i = 0; i < 64; i += 16) {
    const I numbers = _mm512_maskz_permutex2var_epi16(0xaaaaaaaau, even, order, odd);
    _mm512_storeu_si512(to + i, numbers);
    order = _mm512_add_epi16(order, _mm512_set1_epi16(8));
  }
}

/// A row of 2:4 panels (panels.h), expanded: word w has the codes of k = w, w + 64, w + 32, w + 96.
MARLIN_SIMD_INLINE I ExpandKept(const uint8_t* kept, const uint8_t* metadata, int /*part*/) {
  // The bits of the kept k of a block, by its nibble.
  const __m128i kept_bits = _mm_setr_epi8(1, 3, 5, 9, 3, 2, 6, 10, 5, 6, 4, 12, 9, 10, 12, 8);
  const __m128i nibbles = _mm_load_si128(reinterpret_cast<const __m128i*>(metadata));
  const __m128i low_nibble = _mm_set1_epi8(0x0f);
  const __m128i even = _mm_shuffle_epi8(kept_bits, _mm_and_si128(nibbles, low_nibble));
  const __m128i odd =
      _mm_shuffle_epi8(kept_bits, _mm_and_si128(_mm_srli_epi16(nibbles, 4), low_nibble));
  const __m128i masks = _mm_or_si128(even, _mm_slli_epi16(odd, 4));
  const auto first = static_cast<__mmask64>(_mm_cvtsi128_si64(masks));
  const auto second = static_cast<__mmask64>(_mm_extract_epi64(masks, 1));
  const I packed =
      _mm512_zextsi256_si512(_mm256_load_si256(reinterpret_cast<const __m256i*>(kept)));
  constexpr int kSelect = 0xca;  // a ? b : c, bit by bit.
  const I codes =
      _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x0f), _mm512_maskz_expand_epi8(first, packed),
                                _mm512_maskz_expand_epi8(second, packed), kSelect);
  // Byte k has the codes of k and k + 64; the code of k + 32 goes next to it.
  alignas(64) static constexpr uint8_t kInterleaved[64] = {
      0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
      11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
      22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
  return _mm512_permutexvar_epi8(_mm512_load_si512(kInterleaved), codes);
}

/// Sum of all lanes in a fixed order: halves first.
MARLIN_SIMD_INLINE float Sum(F v) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

/// Maximum over all lanes; unspecified if a lane is NaN.
MARLIN_SIMD_INLINE float Largest(F v) {
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}
/// Lane i is the sum of the lanes of v[i], in the same order for every i.
MARLIN_SIMD_INLINE F SumEach(const F (&v)[kLanes]) {
  F pairs[8];
  for (int i = 0; i < 8; ++i) {
    pairs[i] =
        Add(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  }
  F fours[4];
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]);
    const __m512d b = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] =
        Add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  // 0x88 takes the even 128-bit quarters of both operands, 0xdd the odd ones.
  const F low = Add(_mm512_shuffle_f32x4(fours[0], fours[1], 0x88),
                    _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
  const F high = Add(_mm512_shuffle_f32x4(fours[2], fours[3], 0x88),
                     _mm512_shuffle_f32x4(fours[2], fours[3], 0xdd));
  return Add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

/// Loads widen kLanes 16-bit floats; LoadBytes zero-extends bytes to words. Stores round to nearest
/// even.
MARLIN_SIMD_INLINE F LoadHalf(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
MARLIN_SIMD_INLINE F LoadBf16(const uint16_t* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
MARLIN_SIMD_INLINE F LoadBytes(const uint8_t* p) {
  return _mm512_castsi512_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
MARLIN_SIMD_INLINE void StoreHalf(uint16_t* p, F v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
MARLIN_SIMD_INLINE void StoreBf16(uint16_t* p, F v) {
  const I bits = AsWords(v);
  const I odd = And(ShiftRight<16>(bits), SetWord(1));
  const I rounded = ShiftRight<16>(AddWords(bits, AddWords(odd, SetWord(0x7fff))));
  const I quiet = Or(ShiftRight<16>(bits), SetWord(0x40));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet)));
}
/// Deinterleaves 32 consecutive floats into the 16 even and the 16 odd ones.
MARLIN_SIMD_INLINE void StoreDeinterleaved(float* out, const float* in) {
  const I even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const F low = Load(in);
  const F high = Load(in + 16);
  Store(out, _mm512_permutex2var_ps(low, even, high));
  Store(out + 16, _mm512_permutex2var_ps(low, AddWords(even, SetWord(1)), high));
}
/// Transposes 16 x 16 32-bit elements in registers.
MARLIN_SIMD_INLINE void Transpose16(I (&r)[16]) {
  I t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

MARLIN_SIMD_INLINE void Prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

}  // namespace marlin::cpu::avx512
