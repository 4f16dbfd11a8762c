// Dequantization of CPU panels, in the vector operations of one simd_*.h. Included after that simd
// header, inside its instruction set's namespace.
//
//   weight(n, k) = round32(round32(value(code) - zero) * scale) (+ bias, rounded)
#pragma once

#include "backends/cpu/simd/unroll.inl.h"

inline constexpr int kParts = 16 / kLanes;  ///< Vectors per 16 floats.

enum class Kind { kTable, kOffset, kS8, kU8, kE4M3, kE5M2, kTable256, kBf16, kFp16, kFp32 };

/// FP8 to fp32: shifts the fields into place and corrects the exponent bias. Subnormals then have a
/// spurious leading 1, which 2 (f - 2^-kBias) removes. Inputs have no NaN codes (checked at load).
template <int kMantissaBits, int kBias>
MARLIN_SIMD_INLINE F Fp8ToFloat(I byte) {
  constexpr uint32_t kOne = static_cast<uint32_t>(127 - kBias) << 23;
  constexpr uint32_t kExponentMask = 0x7fu & ~((1u << kMantissaBits) - 1u);
  const I magnitude = ShiftLeft<23 - kMantissaBits>(And(byte, SetWord(0x7f)));
  const F normal = AsFloat(AddWords(magnitude, SetWord(kOne)));
  const F rest = Sub(normal, AsFloat(SetWord(kOne)));
  const F value = SelectZero(byte, SetWord(kExponentMask), Add(rest, rest), normal);
  return AsFloat(Or(AsWords(value), ShiftLeft<24>(And(byte, SetWord(0x80)))));
}

/// The bf16 bits of an 8-bit float without its sign.
template <int kMantissaBits, int kBias>
constexpr uint16_t Bf16OfFp8(int magnitude) {
  int exponent = magnitude >> kMantissaBits;
  int mantissa = magnitude & ((1 << kMantissaBits) - 1);
  if (exponent == 0) {
    if (mantissa == 0) return 0;
    // A subnormal: shifted until its leading 1 leaves the field.
    for (exponent = 1; (mantissa >> kMantissaBits) == 0; --exponent) mantissa <<= 1;
    mantissa &= (1 << kMantissaBits) - 1;
  }
  return static_cast<uint16_t>((exponent + 127 - kBias) << 7 | mantissa << (7 - kMantissaBits));
}

/// The bf16 values of the 128 magnitudes of an 8-bit float, as high and low bytes.
struct alignas(64) Fp8Bytes {
  uint8_t high[128];
  uint8_t low[128];
};
template <int kMantissaBits, int kBias>
constexpr Fp8Bytes BytesOfFp8() {
  Fp8Bytes bytes{};
  for (int i = 0; i < 128; ++i) {
    const uint16_t bits = Bf16OfFp8<kMantissaBits, kBias>(i);
    bytes.high[i] = static_cast<uint8_t>(bits >> 8);
    bytes.low[i] = static_cast<uint8_t>(bits & 0xff);
  }
  return bytes;
}
template <Kind kKind>
inline constexpr Fp8Bytes kFp8Bytes = kKind == Kind::kE4M3 ? BytesOfFp8<3, 7>()
                                                           : BytesOfFp8<2, 15>();

/// kLanes stored scales, biases or zero points as fp32.
template <ScaleType kType>
MARLIN_SIMD_INLINE F LoadStored(const void* base, int64_t index) {
  if constexpr (kType == ScaleType::kF16) {
    return LoadHalf(static_cast<const uint16_t*>(base) + index);
  } else if constexpr (kType == ScaleType::kBf16) {
    return LoadBf16(static_cast<const uint16_t*>(base) + index);
  } else if constexpr (kType == ScaleType::kF32) {
    return Load(static_cast<const float*>(base) + index);
  } else if constexpr (kType == ScaleType::kE8M0) {
    const I byte = AsWords(LoadBytes(static_cast<const uint8_t*>(base) + index));
    // Exponent 0 is 2^-127, an fp32 subnormal.
    return SelectZero(byte, SetWord(0xff), AsFloat(SetWord(0x00400000)),
                      AsFloat(ShiftLeft<23>(byte)));
  } else {
    return Fp8ToFloat<3, 7>(AsWords(LoadBytes(static_cast<const uint8_t*>(base) + index)));
  }
}

/// Widens `count` stored parameters from index `first` on, times a factor. Prefetches as many
/// after them: the parameters of the next KC block, or of the next column block, follow in memory,
/// and without the prefetch every KC block would stall for a DRAM latency.
template <ScaleType kType>
static void LoadGroups(const void* base, int64_t first, int64_t count, float factor, float* out) {
  constexpr int64_t kBytes = kType == ScaleType::kF32                                 ? 4
                             : kType == ScaleType::kE8M0 || kType == ScaleType::kE4M3 ? 1
                                                                                      : 2;
  for (int64_t i = 0; i < count * kBytes; i += 64) {
    Prefetch(static_cast<const uint8_t*>(base) + (first + count) * kBytes + i);
  }
  const F factors = Set(factor);
  for (int64_t i = 0; i < count; i += kLanes) {
    Store(out + i, Mul(LoadStored<kType>(base, first + i), factors));
  }
}

/// The same for a type that is known at run time.
static void LoadGroups(const void* base, ScaleType type, int64_t first, int64_t count, float factor,
                       float* out) {
  switch (type) {
    case ScaleType::kF16:
      return LoadGroups<ScaleType::kF16>(base, first, count, factor, out);
    case ScaleType::kBf16:
      return LoadGroups<ScaleType::kBf16>(base, first, count, factor, out);
    case ScaleType::kF32:
      return LoadGroups<ScaleType::kF32>(base, first, count, factor, out);
    case ScaleType::kE8M0:
      return LoadGroups<ScaleType::kE8M0>(base, first, count, factor, out);
    case ScaleType::kE4M3:
      return LoadGroups<ScaleType::kE4M3>(base, first, count, factor, out);
  }
}

/// kLanes i8 as fp32.
MARLIN_SIMD_INLINE F LoadSigned(const uint8_t* p) {
  return ToFloat(ShiftRightSigned<24>(ShiftLeft<24>(AsWords(LoadBytes(p)))));
}

/// Products of the i8 parameters of `count` groups of a block and their super groups' factors.
/// Prefetches as LoadGroups does.
template <ScaleType kType>
static void LoadProducts(const PanelView& w, const void* parameters, const void* factors,
                         int64_t block, int64_t first_group, int64_t count, float* out) {
  const auto* const from =
      static_cast<const uint8_t*>(parameters) + (block * w.groups + first_group) * 16;
  for (int64_t i = 0; i < count * 16; i += 64) Prefetch(from + count * 16 + i);
  int64_t super_group = first_group / w.groups_per_super_group;
  int64_t left = w.groups_per_super_group - first_group % w.groups_per_super_group;
  for (int64_t group = 0; group < count; ++group) {
    const int64_t at = (block * w.super_groups + super_group) * 16;
    for (int64_t i = 0; i < 16; i += kLanes) {
      Store(out + group * 16 + i,
            Mul(LoadStored<kType>(factors, at + i), LoadSigned(from + group * 16 + i)));
    }
    if (--left == 0) {
      left = w.groups_per_super_group;
      ++super_group;
    }
  }
}

/// The same for a type that is known at run time: fp16, bf16 or fp32.
static void LoadProducts(const PanelView& w, const void* parameters, const void* factors,
                         int64_t block, int64_t first_group, int64_t count, float* out) {
  switch (w.scale_type) {
    case ScaleType::kF16:
      return LoadProducts<ScaleType::kF16>(w, parameters, factors, block, first_group, count, out);
    case ScaleType::kBf16:
      return LoadProducts<ScaleType::kBf16>(w, parameters, factors, block, first_group, count, out);
    default:
      return LoadProducts<ScaleType::kF32>(w, parameters, factors, block, first_group, count, out);
  }
}

/// Chunks per KC block: their group parameters are widened at a time.
inline constexpr int64_t kPassChunks = kPassK / kChunkK;

/// Scales, zero points and biases, as fp32 [group][16], of the groups that a run of at most
/// kPassChunks chunks touches.
struct GroupParameters {
  static constexpr int64_t kMaxGroups = kPassK / 16 + 1;
  float scale[kMaxGroups * 16];
  float zero[kMaxGroups * 16];
  float bias[kMaxGroups * 16];
  int64_t first_group = 0;

  void Fill(const PanelView& w, int64_t block, int64_t first_chunk, int64_t chunk_count) {
    if (w.scales == nullptr) return;
    first_group = first_chunk * kChunkK / w.group_size;
    const int64_t last_group = ((first_chunk + chunk_count) * kChunkK - 1) / w.group_size;
    const int64_t first = (block * w.groups + first_group) * 16;
    const int64_t groups = last_group - first_group + 1;
    const int64_t count = groups * 16;
    if (w.zeros != nullptr) LoadGroups(w.zeros, w.zero_type, first, count, 1.0f, zero);
    if (w.super_scales != nullptr) {
      LoadProducts(w, w.scales, w.super_scales, block, first_group, groups, scale);
      if (w.biases != nullptr) {
        LoadProducts(w, w.biases, w.super_biases, block, first_group, groups, bias);
      }
      return;
    }
    LoadGroups(w.scales, w.scale_type, first, count, w.global_scale_divides ? 1.0f : w.global_scale,
               scale);
    if (w.global_scale_divides) {
      const F divisor = Set(w.global_scale);
      for (int64_t i = 0; i < count; i += kLanes) Store(scale + i, Div(Load(scale + i), divisor));
    }
    if (w.biases != nullptr) {
      const bool byte = w.scale_type == ScaleType::kE8M0 || w.scale_type == ScaleType::kE4M3;
      LoadGroups(w.biases, byte ? ScaleType::kF16 : w.scale_type, first, count, 1.0f, bias);
    }
  }
};

/// The words of one row of split codes. 6 bits: bits 0..3 of all slices, and bits 4 and 5. 5 bits:
/// the codes of slices 0 to 2, and of slice 3.
template <int kBits>
struct SplitWords {
  I first;
  I second;

  static inline __attribute__((always_inline)) SplitWords Load(const uint8_t* chunk, int r,
                                                               int part) {
    const int offset = part * kLanes * 4;
    const uint8_t* const rest = chunk + kRestOffset + offset;
    const I words = LoadWords(chunk + 64 * r + offset);
    if constexpr (kBits == 6) {
      const I high = LoadWords(rest + 64 * (r / 2));
      return {words, (r & 1) != 0 ? ShiftRight<8>(high) : high};
    } else {
      I fourth = LoadWords(rest + 64 * (r / 4));
      if ((r & 2) != 0) fourth = ShiftRight<8>(fourth);
      if ((r & 1) != 0) fourth = ShiftRight<4>(fourth);
      return {words, SelectBits(SetWord(0x000f000f), fourth, ShiftRight<11>(words))};
    }
  }

  /// The codes of slice kJ at bits 0 and 16 of each lane; the bits above them are unspecified.
  template <int kJ>
  inline __attribute__((always_inline)) I Slice() const {
    if constexpr (kBits == 5) {
      return kJ == 3 ? second : ShiftRight<5 * (kJ % 3)>(first);
    } else {
      const I high = kJ < 3 ? ShiftLeft<(kJ < 3 ? 4 - 2 * kJ : 0)>(second) : ShiftRight<2>(second);
      return SelectBits(SetWord(0x000f000f), ShiftRight<4 * kJ>(first), high);
    }
  }
};

/// Loads the words of one row of a (block, chunk); not of split codes.
template <int kBits>
struct RowWords {
  /// Lanes [kLanes * part, kLanes * (part + 1)) of the 16-lane vector that holds slice j, shifted
  /// so that the code of the even k is at bit Shift(j), of the odd k at bit Shift(j) + 16.
  /// 32-bit codes have one vector per parity instead.
  static inline __attribute__((always_inline)) I Load(const uint8_t* chunk, int r, int j, int part,
                                                      [[maybe_unused]] int parity = 0) {
    const int offset = part * kLanes * 4;
    if constexpr (kBits == 4) {
      return LoadWords(chunk + 64 * r + offset);
    } else if constexpr (kBits == kSparse4) {
      return ExpandKept(chunk + kKeptBytes * r, chunk + kMetadataOffset + kMetadataBytes * r, part);
    } else if constexpr (kBits == 2) {
      const I words = LoadWords(chunk + 64 * (r / 2) + offset);
      return (r & 1) != 0 ? ShiftRight<8>(words) : words;
    } else if constexpr (kBits == 3) {
      const uint8_t* triple = chunk + 192 * (r / 4) + offset;
      if (r % 4 != 3) return LoadWords(triple + 64 * (r % 4));
      const I first = And(ShiftRight<12>(LoadWords(triple)), SetWord(0x000f000f));
      const I second = And(ShiftRight<8>(LoadWords(triple + 64)), SetWord(0x00f000f0));
      const I third = And(ShiftRight<4>(LoadWords(triple + 128)), SetWord(0x0f000f00));
      return Or(first, Or(second, third));
    } else if constexpr (kBits == 8) {
      return LoadWords(chunk + 128 * r + 64 * (j / 2) + offset);
    } else if constexpr (kBits == 16) {
      return LoadWords(chunk + 256 * r + 64 * j + offset);
    } else {
      return LoadWords(chunk + 512 * r + 128 * j + 64 * parity + offset);
    }
  }
  static constexpr int Shift(int j) {
    if (kBits == kSparse4) return 8 * (j % 2) + 4 * (j / 2);
    return kBits <= 4 ? kBits * j : (kBits == 8 ? 8 * (j % 2) : 0);
  }
};

/// The value of the code at bit kShift of every lane; unscaled unless `table` is scaled. Lookups in
/// `table` ignore the bits above the code; the other kinds mask them. `origin` is for kOffset: the
/// number whose mantissa ends in code 0, less the value of that code.
template <int kBits, Kind kKind, int kShift>
MARLIN_SIMD_INLINE F RawValue(const PanelView& w, const Table& table, F origin, I words) {
  if constexpr (kKind == Kind::kTable) {
    return Lookup<CodeBits(kBits)>(table, ShiftRight<kShift>(words));
  } else if constexpr (kKind == Kind::kOffset) {
    // The code becomes the low bits of a mantissa whose last place is 1: 2^23 + code, or from bit
    // 16 on 2^7 + code. Both differences are exact.
    constexpr uint32_t kBaseBits = kShift == 0 ? 0x4b000000 : 0x43000000;
    static_assert(kShift == 0 || kShift == 16);
    const I bits = OrAnd(SetWord(kBaseBits), words, SetWord(((1u << kBits) - 1) << kShift));
    return Sub(AsFloat(bits), origin);
  } else if constexpr (kKind == Kind::kS8) {
    return ToFloat(ShiftRightSigned<24>(ShiftLeft<24 - kShift>(words)));
  } else if constexpr (kKind == Kind::kU8) {
    return ToFloat(And(ShiftRight<kShift>(words), SetWord(0xff)));
  } else if constexpr (kKind == Kind::kE4M3) {
    return Fp8ToFloat<3, 7>(ShiftRight<kShift>(words));
  } else if constexpr (kKind == Kind::kE5M2) {
    return Fp8ToFloat<2, 15>(ShiftRight<kShift>(words));
  } else if constexpr (kKind == Kind::kTable256) {
    return Gather(w.table, And(ShiftRight<kShift>(words), SetWord(0xff)));
  } else if constexpr (kKind == Kind::kFp32) {
    return AsFloat(words);
  } else if constexpr (kKind == Kind::kBf16) {
    return AsFloat(ShiftLeft<16>(ShiftRight<kShift>(words)));
  } else {
    return HalfToFloat(And(ShiftRight<kShift>(words), SetWord(0xffff)));
  }
}

/// Group granularity: one group per chunk, one per slice of 32 k, or one per half slice of 16 k.
enum class GroupMode { kChunk, kSlice, kHalf };

/// Offsets of a chunk's group parameters, one per half slice of 16 k.
struct ChunkGroups {
  int32_t offset[8];
};

/// Fills the ChunkGroups of consecutive chunks from first_chunk on. Divides once, then counts: a
/// division per chunk would cost a tenth of the chunk's FMAs.
template <GroupMode kMode>
static void LocateGroups(const PanelView& w, const GroupParameters& parameters, int64_t first_chunk,
                         int64_t chunk_count, ChunkGroups* groups) {
  constexpr int kStep = kMode == GroupMode::kChunk ? 8 : kMode == GroupMode::kSlice ? 2 : 1;
  const bool scaled = w.scales != nullptr;
  const int64_t steps_per_group = scaled ? w.group_size / (16 * kStep) : 1;
  int64_t left =
      steps_per_group -
      (scaled ? first_chunk * kChunkK - parameters.first_group * w.group_size : 0) / (16 * kStep);
  int32_t offset = 0;
  for (int64_t c = 0; c < chunk_count; ++c) {
    for (int half = 0; half < 8; half += kStep) {
      groups[c].offset[half] = offset;
      if (--left == 0) {
        left = steps_per_group;
        if (scaled) offset += 16;
      }
    }
  }
}

/// The value table of a group and row with the scale folded in, instead of scaling every weight.
/// `index` is the index into the parameters.
MARLIN_SIMD_INLINE Table ScaledTable(const PanelView& w, const GroupParameters& parameters,
                                     int64_t index) {
  Table table = LoadTable(w.table);
  if (w.zeros != nullptr) table = SubTable(table, Set(parameters.zero[index]));
  table = MulTable(table, Set(parameters.scale[index]));
  if (w.biases != nullptr) {
    table = AddTable(table, Set(parameters.bias[index]));
  }
  return table;
}

/// Whether FP8 codes become bf16 words by byte permutation, two slices at a time.
template <Kind kKind>
inline constexpr bool kFp8ByBytes = kLooksUpBytes && (kKind == Kind::kE4M3 || kKind == Kind::kE5M2);

/// Words that the slices of a row share.
template <int kBits>
struct SharedWords {
  I second[kParts];                 ///< The next slice, of a look-up of FP8.
  SplitWords<kBits> split[kParts];  ///< The words of split codes.
};

/// Loads the words of slice kJ of a row unless they are there already: up to 4 bits, all four
/// slices share their words. Values of 32 bits have no words of a slice.
template <int kBits, Kind kKind, int kJ>
MARLIN_SIMD_INLINE void LoadSliceWords(const uint8_t* chunk, int row, I (&words)[kParts],
                                       SharedWords<kBits>& shared) {
  if constexpr (IsSplit(kBits)) {
    for (int part = 0; part < kParts; ++part) {
      // Loaded once: the compiler cannot know that a sink's stores leave the codes alone.
      if constexpr (kJ == 0) shared.split[part] = SplitWords<kBits>::Load(chunk, row, part);
      words[part] = shared.split[part].template Slice<kJ>();
    }
  } else if constexpr (kFp8ByBytes<kKind> && kJ % 2 == 1) {
    for (int part = 0; part < kParts; ++part) words[part] = shared.second[part];
  } else if constexpr ((kJ == 0 || CodeBits(kBits) > 4) && kBits < 32) {
    for (int part = 0; part < kParts; ++part) {
      words[part] = RowWords<kBits>::Load(chunk, row, kJ, part);
      if constexpr (kFp8ByBytes<kKind>) {
        LookUpBytes(kFp8Bytes<kKind>.high, kFp8Bytes<kKind>.low, words[part], shared.second[part]);
      }
    }
  }
}

/// Decodes one row of a chunk and passes every vector of weights to sink(offset, weights), where
/// offset is the position in the chunk's packed activations, in floats. Offsets ascend.
template <int kBits, Kind kKind, GroupMode kMode, class Sink>
__attribute__((always_inline)) static inline void DecodeRow(const PanelView& w,
                                                            const GroupParameters& parameters,
                                                            const ChunkGroups& groups,
                                                            const uint8_t* chunk, int row,
                                                            Sink&& sink) {
  constexpr bool kScaled = CodeBits(kBits) <= 8;
  constexpr bool kFolded = kKind == Kind::kTable && kMode != GroupMode::kHalf;
  constexpr bool kByBytes = kFp8ByBytes<kKind>;
  constexpr Kind kRawKind = kByBytes ? Kind::kBf16 : kKind;
  Table table = LoadTable(w.table);
  // Loaded once, like the codes.
  const F origins[2] = {Set(0x1p23f - w.table[0]), Set(0x1p7f - w.table[0])};
  I words[kParts];
  SharedWords<kBits> shared;
  Unroll<4>([&](auto j) __attribute__((always_inline)) {
    constexpr int kJ = decltype(j)::value;
    const int64_t low = groups.offset[kMode == GroupMode::kChunk ? 0 : 2 * kJ] + row;
    const int64_t high = kMode == GroupMode::kHalf ? groups.offset[2 * kJ + 1] + row : low;
    if constexpr (kFolded && (kJ == 0 || kMode == GroupMode::kSlice)) {
      table = ScaledTable(w, parameters, low);
    }
    const auto stored = [&](const float* values, int part) __attribute__((always_inline)) {
      return kMode == GroupMode::kHalf ? SplitSet(values[low], values[high], part)
                                       : Set(values[low]);
    };
    const auto scaled = [&](F value, int part) __attribute__((always_inline)) {
      if (w.zeros != nullptr) value = Sub(value, stored(parameters.zero, part));
      value = Mul(value, stored(parameters.scale, part));
      if (w.biases != nullptr) value = Add(value, stored(parameters.bias, part));
      return value;
    };
    LoadSliceWords<kBits, kKind, kJ>(chunk, row, words, shared);
    Unroll<2>([&](auto parity) __attribute__((always_inline)) {
      constexpr int kParity = decltype(parity)::value;
      constexpr int kShift = (kByBytes ? 0 : RowWords<kBits>::Shift(kJ)) + 16 * kParity;
      for (int part = 0; part < kParts; ++part) {
        const I codes =
            kBits == 32 ? RowWords<kBits>::Load(chunk, row, kJ, part, kParity) : words[part];
        F value = RawValue<kBits, kRawKind, kShift>(w, table, origins[kParity], codes);
        if constexpr (kScaled && !kFolded) value = scaled(value, part);
        sink(32 * kJ + 16 * kParity + kLanes * part, value);
      }
    });
  });
}

/// Calls body(bits, kind, mode) with the format of a matrix as compile-time constants.
template <class Body>
static auto Dispatch(const PanelView& w, Body&& body) {
  constexpr auto kChunkMode = Index<static_cast<int>(GroupMode::kChunk)>{};
  constexpr auto kHalfMode = Index<static_cast<int>(GroupMode::kHalf)>{};
  const auto with_mode = [&](auto bits, auto kind) {
    if (w.group_size % kChunkK == 0) return body(bits, kind, kChunkMode);
    if constexpr (CodeBits(decltype(bits)::value) <= 6) {
      if (w.group_size % kSliceK == 0) {
        return body(bits, kind, Index<static_cast<int>(GroupMode::kSlice)>{});
      }
    }
    return body(bits, kind, kHalfMode);
  };
  constexpr auto kKindOf = [](Kind kind) { return static_cast<int>(kind); };
  switch (w.bits) {
    case 2:
      return with_mode(Index<2>{}, Index<kKindOf(Kind::kTable)>{});
    case 3:
      return with_mode(Index<3>{}, Index<kKindOf(Kind::kTable)>{});
    case 4:
      return with_mode(Index<4>{}, Index<kKindOf(Kind::kTable)>{});
    case 5:
      return with_mode(Index<5>{}, Index<kKindOf(Kind::kOffset)>{});
    case 6:
      return with_mode(Index<6>{}, Index<kKindOf(Kind::kOffset)>{});
    case kSparse4:
      return with_mode(Index<kSparse4>{}, Index<kKindOf(Kind::kTable)>{});
    case 32:
      return body(Index<32>{}, Index<kKindOf(Kind::kFp32)>{}, kChunkMode);
    case 16:
      return w.format == Format::kBf16
                 ? body(Index<16>{}, Index<kKindOf(Kind::kBf16)>{}, kChunkMode)
                 : body(Index<16>{}, Index<kKindOf(Kind::kFp16)>{}, kChunkMode);
    default:
      switch (w.format) {
        case Format::kS8:
          return with_mode(Index<8>{}, Index<kKindOf(Kind::kS8)>{});
        case Format::kU8:
          return with_mode(Index<8>{}, Index<kKindOf(Kind::kU8)>{});
        case Format::kFp8E4M3:
          return with_mode(Index<8>{}, Index<kKindOf(Kind::kE4M3)>{});
        case Format::kFp8E5M2:
          return with_mode(Index<8>{}, Index<kKindOf(Kind::kE5M2)>{});
        default:
          return with_mode(Index<8>{}, Index<kKindOf(Kind::kTable256)>{});
      }
  }
}
