// The W4A8 GEMM on AVX2.
#include "backends/cpu/gemm/w4a8/w4a8_kernel.h"
#include "backends/cpu/simd/simd_avx2.h"

namespace marlin::cpu::avx2 {
#include "backends/cpu/simd/decode.inl.h"
// Separate block: it uses decode.inl.h and must not be sorted before it.
#include "backends/cpu/simd/byte_codes.inl.h"

namespace {

constexpr int kTileRows = 4;
constexpr int kTileParts = 2;
// Bytes of codes of over 4 bits stay signed, so they have no offset: see AddDot.
constexpr int32_t kWideOffset = 0;

/// Transposes 8 x 8 32-bit elements and stores row i at out + 64 i.
MARLIN_SIMD_INLINE void StoreTransposed(const I (&r)[8], uint8_t* out) {
  I t[8];
  I u[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    u[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    u[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    auto* low = reinterpret_cast<I*>(out + 64 * i);
    auto* high = reinterpret_cast<I*>(out + 64 * (i + 4));
    _mm256_store_si256(low, _mm256_permute2x128_si256(u[i], u[i + 4], 0x20));
    _mm256_store_si256(high, _mm256_permute2x128_si256(u[i], u[i + 4], 0x31));
  }
}

template <int kBits, int kPair>
void DecodePair(const uint8_t* chunk, const ByteCodes& codes, uint8_t* out) {
  const I table =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes.byte)));
  const I zero = _mm256_set1_epi8(static_cast<char>(codes.zero));
  const I even = SetWord(0x00ff00ff);
  const I odd = SetWord(0xff00ff00);
  for (int first_row = 0; first_row < kBlockRows; first_row += 8) {
    I first[8];
    I second[8];
    for (int r = 0; r < 8; ++r) {
      I half[2];
      for (int part = 0; part < 2; ++part) {
        const I pair = PairCodes<kBits, kPair>(chunk, first_row + r, part);
        half[part] =
            kSignedBytes<kBits> ? _mm256_sub_epi8(pair, zero) : _mm256_shuffle_epi8(table, pair);
      }
      first[r] = Or(And(half[0], even), ShiftLeft<8>(And(half[1], even)));
      second[r] = Or(And(ShiftRight<8>(half[0]), even), And(half[1], odd));
    }
    StoreTransposed(first, out + FirstSlice<kBits>(kPair) * kBytesPerSlice + 4 * first_row);
    StoreTransposed(second, out + SecondSlice<kBits>(kPair) * kBytesPerSlice + 4 * first_row);
  }
}

/// The bytes of 16 consecutive k of 8 columns.
template <int kBits>
struct Bytes {
  I k4[4];
};
template <int kBits>
MARLIN_SIMD_INLINE Bytes<kBits> LoadBytesOf(const uint8_t* p) {
  const auto load = [p](int i) __attribute__((always_inline)) {
    return _mm256_load_si256(reinterpret_cast<const I*>(p + 64 * i));
  };
  return {{load(0), load(1), load(2), load(3)}};
}
template <int kBits>
MARLIN_SIMD_INLINE I AddDot(I sum, const Bytes<kBits>& weights, const int8_t* q) {
  const I ones = _mm256_set1_epi16(1);
  I words[4];
  Unroll<4>([&](auto i) __attribute__((always_inline)) {
    int32_t four;
    __builtin_memcpy(&four, q + 4 * i, sizeof(four));
    const I x = _mm256_set1_epi32(four);
    if constexpr (kBits == 8) {
      // |w| <= 128 and |q| <= 127: a pair of products stays below 2^15; with u <= 255 it would not.
      words[i] = _mm256_madd_epi16(
          _mm256_maddubs_epi16(_mm256_abs_epi8(weights.k4[i]), _mm256_sign_epi8(x, weights.k4[i])),
          ones);
    } else {
      // u <= 32: the sum of four pairs stays below 2^15.
      words[i] = _mm256_maddubs_epi16(weights.k4[i], x);
    }
  });
  if constexpr (kBits == 8) {
    return AddWords(sum, AddWords(AddWords(words[0], words[1]), AddWords(words[2], words[3])));
  } else {
    const I all = _mm256_add_epi16(_mm256_add_epi16(words[0], words[1]),
                                   _mm256_add_epi16(words[2], words[3]));
    return AddWords(sum, _mm256_madd_epi16(all, ones));
  }
}

/// a b + c.
MARLIN_SIMD_INLINE F RoundedOnce(F a, F b, F c) { return Fma(a, b, c); }

}  // namespace

#include "backends/cpu/simd/unsigned_codes.inl.h"
// Separate block: it uses unsigned_codes.inl.h.
#include "backends/cpu/gemm/w4a8/w4a8_kernel.inl.h"

}  // namespace marlin::cpu::avx2
