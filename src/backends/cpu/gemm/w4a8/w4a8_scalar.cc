// The W4A8 GEMM on any processor.
#include <cmath>

#include "backends/cpu/gemm/w4a8/w4a8_kernel.h"
#include "backends/cpu/simd/simd_scalar.h"

namespace marlin::cpu::scalar {
#include "backends/cpu/simd/decode.inl.h"
// Separate block: it uses decode.inl.h and must not be sorted before it.
#include "backends/cpu/simd/byte_codes.inl.h"

namespace {

constexpr int kTileRows = 4;
constexpr int kTileParts = 1;
constexpr int32_t kWideOffset = 128;

template <int kBits, int kPair>
void DecodePair(const uint8_t* chunk, const ByteCodes& codes, uint8_t* out) {
  const auto byte = [&](I words, int shift) {
    const I code = (words >> shift) & 0xffu;
    if constexpr (kBits == 8) return static_cast<uint8_t>(code ^ 0x80u);
    if constexpr (IsSplit(kBits)) return static_cast<uint8_t>(code + 0x80u - codes.zero);
    return codes.byte[code & 15u];
  };
  uint8_t* first = out + FirstSlice<kBits>(kPair) * kBytesPerSlice;
  uint8_t* second = out + SecondSlice<kBits>(kPair) * kBytesPerSlice;
  for (int i = 0; i < 8; ++i) {
    for (int row = 0; row < kBlockRows; ++row) {
      const I low = PairCodes<kBits, kPair>(chunk, row, i);
      const I high = PairCodes<kBits, kPair>(chunk, row, i + 8);
      const int at = 4 * (16 * i + row);
      for (int c = 0; c < 4; ++c) {
        const I words = c % 2 == 0 ? low : high;
        first[at + c] = byte(words, 16 * (c / 2));
        second[at + c] = byte(words, 16 * (c / 2) + 8);
      }
    }
  }
}

/// The bytes of 16 consecutive k of one column.
template <int kBits>
struct Bytes {
  const uint8_t* bytes;
};
template <int kBits>
Bytes<kBits> LoadBytesOf(const uint8_t* p) {
  return {p};
}
template <int kBits>
I AddDot(I sum, const Bytes<kBits>& weights, const int8_t* q) {
  int32_t dot = 0;
  for (int i = 0; i < 16; ++i) dot += weights.bytes[64 * (i / 4) + i % 4] * q[i];
  return sum + static_cast<uint32_t>(dot);
}

/// a b + c. Fma rounds twice here.
F RoundedOnce(F a, F b, F c) { return std::fma(a, b, c); }

}  // namespace

#include "backends/cpu/simd/unsigned_codes.inl.h"
// Separate block: it uses unsigned_codes.inl.h.
#include "backends/cpu/gemm/w4a8/w4a8_kernel.inl.h"

}  // namespace marlin::cpu::scalar
