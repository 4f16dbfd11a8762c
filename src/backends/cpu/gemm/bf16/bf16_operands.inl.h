// The operands of the bf16 GEMMs on AVX-512 registers: panels decoded to bf16, activations split
// into bf16 terms. Included after decode.inl.h, inside the namespace of the instruction set.

/// Rounds 16 fp32 to bf16.
MARLIN_SIMD_INLINE __m256i ToBf16(F v) { return (__m256i)_mm512_cvtneps_pbh(v); }

/// Rounds 16 even and 16 odd k to bf16 and interleaves them to 32 consecutive k.
MARLIN_SIMD_INLINE I JoinBf16(F even, F odd) {
  // Word i of the result is word i / 2 of the even k, or 16 + i / 2 of the odd ones that follow.
  alignas(64) static constexpr uint16_t kInterleaved[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kInterleaved),
                                  (I)_mm512_cvtne2ps_pbh(odd, even));
}

/// DecodeBf16Row for up to 4 bits: looks the codes up in a table of scaled bf16 weights.
template <int kBits, GroupMode kMode, class Sink>
MARLIN_SIMD_INLINE void DecodeTableRow(const PanelView& w, const GroupParameters& parameters,
                                       const ChunkGroups& groups, const uint8_t* chunk, int row,
                                       Sink&& sink) {
  const auto scaled = [&](int64_t offset) __attribute__((always_inline)) {
    return ScaledTable(w, parameters, offset + row).values;
  };
  I table = _mm512_setzero_si512();
  // Loaded once: a second load would stall on 4K aliasing with the stores before it.
  const I codes = RowWords<kBits>::Load(chunk, row, 0, 0);
  Unroll<4>([&](auto j) __attribute__((always_inline)) {
    constexpr int kJ = decltype(j)::value;
    const I words = _mm512_srli_epi16(codes, RowWords<kBits>::Shift(kJ));
    if constexpr (kMode == GroupMode::kHalf) {
      // Index bit 4 selects the group: 0 in words 0..15, 1 in words 16..31.
      table =
          (I)_mm512_cvtne2ps_pbh(scaled(groups.offset[2 * kJ + 1]), scaled(groups.offset[2 * kJ]));
      const I second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
      const I index = Or(And(words, _mm512_set1_epi16(15)), second);
      sink(j, _mm512_permutexvar_epi16(index, table));
    } else {
      if constexpr (kJ == 0 || kMode == GroupMode::kSlice) {
        constexpr int kFirst = kMode == GroupMode::kChunk ? 0 : 2 * kJ;
        const F values = scaled(groups.offset[kFirst]);
        table = (I)_mm512_cvtne2ps_pbh(values, values);
      }
      sink(j, _mm512_permutexvar_epi16(words, table));
    }
  });
}

/// The 2^kBits bf16 values that values(i), i = 0 .., yields 16 at a time, and their lookup: the
/// bits of an index above a code are ignored.
template <int kBits>
struct SplitTable {
  I words[kBits - 4];

  template <class Values>
  static inline __attribute__((always_inline)) SplitTable Of(Values&& values) {
    SplitTable table;
    for (int i = 0; i < kBits - 4; ++i) {
      table.words[i] = (I)_mm512_cvtne2ps_pbh(values(2 * i + 1), values(2 * i));
    }
    return table;
  }
  inline __attribute__((always_inline)) I LookUp(I index) const {
    if constexpr (kBits == 5) {
      return _mm512_permutexvar_epi16(index, words[0]);
    } else {
      return _mm512_permutex2var_epi16(words[0], index, words[kBits - 5]);
    }
  }
};

/// Whether split codes are looked up among scaled weights: if a group has as many weights as that
/// table, or more. Others are looked up among the values of the codes.
template <int kBits, GroupMode kMode>
inline constexpr bool kFoldsSplit = kMode == GroupMode::kChunk ||
                                    (kMode == GroupMode::kSlice && kBits == 5);

/// DecodeSplitRow with zero points or biases, or without both.
template <int kBits, GroupMode kMode, bool kOffsets, class Sink>
MARLIN_SIMD_INLINE void DecodeSplitSlices(const PanelView& w, const GroupParameters& parameters,
                                          const ChunkGroups& groups, const uint8_t* chunk, int row,
                                          Sink&& sink) {
  constexpr bool kFolded = kFoldsSplit<kBits, kMode>;
  const auto parts = SplitWords<kBits>::Load(chunk, row, 0);
  SplitTable<kBits> table;
  if constexpr (!kFolded) {
    table = SplitTable<kBits>::Of([&](int i) __attribute__((always_inline)) {
      return Load(w.table + 16 * i);
    });
  }
  Unroll<4>([&](auto j) __attribute__((always_inline)) {
    constexpr int kJ = decltype(j)::value;
    const int64_t low = groups.offset[kMode == GroupMode::kChunk ? 0 : 2 * kJ] + row;
    const int64_t high = kMode == GroupMode::kHalf ? groups.offset[2 * kJ + 1] + row : low;
    const auto stored = [&](const float* values) __attribute__((always_inline)) {
      return kMode == GroupMode::kHalf ? SplitSet(values[low], values[high], 0) : Set(values[low]);
    };
    const F scale = stored(parameters.scale);
    const auto scaled = [&](F value) __attribute__((always_inline)) {
      if (kOffsets && w.zeros != nullptr) value = Sub(value, stored(parameters.zero));
      value = Mul(value, scale);
      if (kOffsets && w.biases != nullptr) value = Add(value, stored(parameters.bias));
      return value;
    };
    if constexpr (kFolded && (kJ == 0 || kMode == GroupMode::kSlice)) {
      table = SplitTable<kBits>::Of([&](int i) __attribute__((always_inline)) {
        return scaled(Load(w.table + 16 * i));
      });
    }
    const I values = table.LookUp(parts.template Slice<kJ>());
    if constexpr (kFolded) {
      sink(j, values);
    } else {
      sink(j, JoinBf16(scaled(AsFloat(ShiftLeft<16>(values))),
                       scaled(AsFloat(And(values, SetWord(0xffff0000))))));
    }
  });
}

/// DecodeBf16Row for split codes.
template <int kBits, GroupMode kMode, class Sink>
MARLIN_SIMD_INLINE void DecodeSplitRow(const PanelView& w, const GroupParameters& parameters,
                                       const ChunkGroups& groups, const uint8_t* chunk, int row,
                                       Sink&& sink) {
  // Where every vector is scaled, branches for each take up to a tenth of the time.
  if (!kFoldsSplit<kBits, kMode> && w.zeros == nullptr && w.biases == nullptr) {
    DecodeSplitSlices<kBits, kMode, false>(w, parameters, groups, chunk, row, sink);
  } else {
    DecodeSplitSlices<kBits, kMode, true>(w, parameters, groups, chunk, row, sink);
  }
}

/// Decodes one row of a chunk to bf16: passes slice j = 0..3, the weights of 32 consecutive k, to
/// sink(Index<j>, slice).
template <int kBits, Kind kKind, GroupMode kMode, class Sink>
MARLIN_SIMD_INLINE void DecodeBf16Row(const PanelView& w, const GroupParameters& parameters,
                                      const ChunkGroups& groups, const uint8_t* chunk, int row,
                                      Sink&& sink) {
  if constexpr (kKind == Kind::kBf16) {
    Unroll<4>([&](auto j) __attribute__((always_inline)) {
      sink(j, RowWords<16>::Load(chunk, row, j, 0));
    });
  } else if constexpr (kKind == Kind::kTable) {
    DecodeTableRow<kBits, kMode>(w, parameters, groups, chunk, row, sink);
  } else if constexpr (kKind == Kind::kOffset) {
    DecodeSplitRow<kBits, kMode>(w, parameters, groups, chunk, row, sink);
  } else {
    F vectors[8];
    DecodeRow<kBits, kKind, kMode>(
        w, parameters, groups, chunk, row, [&](int offset, F value) __attribute__((always_inline)) {
          vectors[offset / kLanes] = value;
        });
    Unroll<4>([&](auto j) __attribute__((always_inline)) {
      sink(j, JoinBf16(vectors[2 * j], vectors[2 * j + 1]));
    });
  }
}

/// Splits 32 activations of one row into bf16 `high` and the bf16 rounding error `low`. Elements
/// from `count` on are zero.
MARLIN_SIMD_INLINE void SplitSlice(const uint8_t* a, DType type, int64_t count, I& high, I& low) {
  const auto mask = static_cast<__mmask32>((1ull << (count < 32 ? count : 32)) - 1);
  low = _mm512_setzero_si512();
  if (type == DType::kBf16) {
    high = _mm512_maskz_loadu_epi16(mask, a);
    return;
  }
  F first;
  F second;
  if (type == DType::kF16) {
    const I words = _mm512_maskz_loadu_epi16(mask, a);
    first = _mm512_cvtph_ps(_mm512_castsi512_si256(words));
    second = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1));
  } else {
    first = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), a);
    second = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), a + 64);
  }
  const auto join = [](F x, F y) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(ToBf16(x)), ToBf16(y), 1);
  };
  const auto rest = [](F x) {
    const F rounded = AsFloat(ShiftLeft<16>(_mm512_cvtepu16_epi32(ToBf16(x))));
    // Inf has no rounding error; Inf - Inf would be NaN.
    const __mmask16 finite = _mm512_cmp_ps_mask(Sub(rounded, rounded), Zero(), _CMP_EQ_OQ);
    return _mm512_maskz_sub_ps(finite, x, rounded);
  };
  high = join(first, second);
  low = join(rest(first), rest(second));
}
