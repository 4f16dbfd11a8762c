// Codes of panel rows as bytes. Included after decode.inl.h, before an instruction set's own
// DecodePair.

/// Codes of two slices of a row for lanes `part`: the first slice in the even bytes, the second in
/// the odd ones. The pairs are (0, 2) and (1, 3) up to 4 bits, where the bits above a code are
/// unspecified, and (0, 1) and (2, 3) above.
template <int kBits, int kPair>
MARLIN_SIMD_INLINE I PairCodes(const uint8_t* chunk, int row, int part) {
  if constexpr (kBits == 8) {
    return RowWords<8>::Load(chunk, row, 2 * kPair, part);
  } else if constexpr (IsSplit(kBits)) {
    const auto words = SplitWords<kBits>::Load(chunk, row, part);
    constexpr uint32_t kCodes = ((1u << kBits) - 1) * 0x00010001u;
    return Or(And(words.template Slice<2 * kPair>(), SetWord(kCodes)),
              And(ShiftLeft<8>(words.template Slice<2 * kPair + 1>()), SetWord(kCodes << 8)));
  } else {
    const I words = RowWords<kBits>::Load(chunk, row, 0, part);
    const I first = And(ShiftRight<RowWords<kBits>::Shift(kPair)>(words), SetWord(0x000f000f));
    // The second slice's code moves to bit 8.
    constexpr int kUp = 8 - RowWords<kBits>::Shift(kPair + 2);
    if constexpr (kUp >= 0) {
      return Or(first, And(ShiftLeft<kUp>(words), SetWord(0x0f000f00)));
    } else {
      return Or(first, And(ShiftRight<-kUp>(words), SetWord(0x0f000f00)));
    }
  }
}

/// Whether bytes are the signed values of codes, not looked up.
template <int kBits>
inline constexpr bool kSignedBytes = kBits > 4;

/// The width whose bytes are multiplied in the same way.
constexpr int ByteBits(int bits) { return bits > 4 ? 8 : bits; }

/// The two slices of a pair.
template <int kBits>
constexpr int FirstSlice(int pair) {
  return kSignedBytes<kBits> ? 2 * pair : pair;
}
template <int kBits>
constexpr int SecondSlice(int pair) {
  return kSignedBytes<kBits> ? 2 * pair + 1 : pair + 2;
}

/// Bytes of a decoded chunk, [slice][8][16 rows][4 k].
inline constexpr int64_t kBytesPerSlice = int64_t{kBlockRows} * kSliceK;
inline constexpr int64_t kBytesPerChunk = int64_t{kBlockRows} * kChunkK;
