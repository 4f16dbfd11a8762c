// The W4A8 GEMM on AVX-512 VNNI. vpdpbusd multiplies unsigned by signed bytes: here the activations
// are the unsigned ones, q + 128 (PackUnsigned), because then the correction, -128 times the sum of
// a column's weights, is the same for all rows: their sums start there.
#include "backends/cpu/gemm/w4a8/w4a8_kernel.h"
#include "backends/cpu/simd/simd_avx512.h"

namespace marlin::cpu::vnni {
using namespace avx512;  // NOLINT(google-build-using-namespace): its names are this file's words.
#include "backends/cpu/simd/decode.inl.h"
// Separate block: it uses decode.inl.h and must not be sorted before it.
#include "backends/cpu/simd/byte_codes.inl.h"

namespace {

constexpr int kTileRows = 8;
constexpr int kTileParts = 1;
constexpr int32_t kWideOffset = 0;

/// Permutation that separates two slices. Low half: byte 4 i + c is k = 2 i + {0, 16, 1, 17}[c] of
/// the first slice, from even bytes. High half: the same of the second slice, from odd bytes.
alignas(64) constexpr uint8_t kSplitSlices[64] = {
    0,  32, 2,  34, 4,  36, 6,  38, 8,  40, 10, 42, 12, 44, 14, 46, 16, 48, 18, 50, 20, 52,
    22, 54, 24, 56, 26, 58, 28, 60, 30, 62, 1,  33, 3,  35, 5,  37, 7,  39, 9,  41, 11, 43,
    13, 45, 15, 47, 17, 49, 19, 51, 21, 53, 23, 55, 25, 57, 27, 59, 29, 61, 31, 63};

template <int kBits, int kPair>
void DecodePair(const uint8_t* chunk, const ByteCodes& codes, uint8_t* out) {
  const I split = _mm512_load_si512(kSplitSlices);
  const __m128i bytes_of = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes.byte));
  const I table = _mm512_broadcast_i32x4(
      _mm_sub_epi8(bytes_of, _mm_set1_epi8(static_cast<char>(codes.offset))));
  const I zero = _mm512_set1_epi8(static_cast<char>(codes.zero));
  I rows[kBlockRows];
  Unroll<kBlockRows>([&](auto r) __attribute__((always_inline)) {
    const I pair = PairCodes<kBits, kPair>(chunk, r, 0);
    const I bytes =
        kSignedBytes<kBits> ? _mm512_sub_epi8(pair, zero) : _mm512_shuffle_epi8(table, pair);
    rows[r] = _mm512_permutexvar_epi8(split, bytes);
  });
  Transpose16(rows);
  for (int i = 0; i < 8; ++i) {
    _mm512_store_si512(out + FirstSlice<kBits>(kPair) * kBytesPerSlice + 64 * i, rows[i]);
    _mm512_store_si512(out + SecondSlice<kBits>(kPair) * kBytesPerSlice + 64 * i, rows[8 + i]);
  }
}

/// The bytes of 16 consecutive k of 16 columns.
template <int kBits>
struct Bytes {
  I k4[4];
};
template <int kBits>
MARLIN_SIMD_INLINE Bytes<kBits> LoadBytesOf(const uint8_t* p) {
  return {{_mm512_load_si512(p), _mm512_load_si512(p + 64), _mm512_load_si512(p + 128),
           _mm512_load_si512(p + 192)}};
}
template <int kBits>
MARLIN_SIMD_INLINE I AddDot(I sum, const Bytes<kBits>& weights, const int8_t* q) {
  Unroll<4>([&](auto i) __attribute__((always_inline)) {
    int32_t four;
    __builtin_memcpy(&four, q + 4 * i, sizeof(four));
    sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi32(four), weights.k4[i]);
  });
  return sum;
}

MARLIN_SIMD_INLINE I StartOf(const int32_t* starts, int part) {
  return _mm512_load_si512(starts + part * kLanes);
}
void FillStarts(const uint8_t* bytes, int64_t slices, int32_t* starts) {
  const I bias = _mm512_set1_epi8(-128);  // 128, unsigned.
  for (int64_t slice = 0; slice < slices; ++slice) {
    I sum = SetWord(0);
    Unroll<kBytesPerSlice / 64>([&](auto i) __attribute__((always_inline)) {
      sum = _mm512_dpbusd_epi32(sum, bias,
                                _mm512_load_si512(bytes + slice * kBytesPerSlice + 64 * i));
    });
    _mm512_store_si512(starts + slice * kBlockRows, _mm512_sub_epi32(SetWord(0), sum));
  }
}

/// a b + c.
MARLIN_SIMD_INLINE F RoundedOnce(F a, F b, F c) { return Fma(a, b, c); }

/// Weights have no offset.
MARLIN_SIMD_INLINE F WithoutOffset(F dot, float /*offset*/, float /*sum*/) { return dot; }

}  // namespace

#include "backends/cpu/gemm/w4a8/w4a8_kernel.inl.h"

}  // namespace marlin::cpu::vnni
