// From the words of a tile to the registers of a matrix instruction. The one place that knows how
// each kind of code is laid out in words (EncodeWords) and taken out of them (FragmentDecoder,
// CodeOf); a test decodes every code of every kind both ways.
#pragma once

#include "backends/cuda/fragment_math.cuh"
#include "backends/cuda/tile_layout.h"

namespace marlin::cuda {

/// Where the bits of FP4 pair `pair` (0..3) of a half word lie: pairs 0 to 2 are {sign, e1 e0 m} at
/// {15, 8..6} shifted right by 0, 3, 6; what is left for pair 3 is {14, 13, 11, 10}.
MARLIN_HOST_DEVICE constexpr uint32_t PlaceFp4(uint32_t code, int pair) {
  const uint32_t sign = code >> 3;
  const uint32_t magnitude = code & 7u;
  if (pair < 3) return ((sign << 15) | (magnitude << 6)) >> (3 * pair);
  return (sign << 14) | ((magnitude >> 2) << 13) | ((magnitude & 3u) << 10);
}
MARLIN_HOST_DEVICE constexpr uint32_t TakeFp4(uint32_t half, int pair) {
  if (pair < 3) {
    const uint32_t placed = half << (3 * pair);
    return ((placed >> 12) & 8u) | ((placed >> 6) & 7u);
  }
  return ((half >> 11) & 8u) | ((half >> 11) & 4u) | ((half >> 10) & 3u);
}

/// One lane's 32 codes (step j of 16 k, pair p, half h at 8 j + 2 p + h) as words; 16-bit kinds are
/// not coded, their words are the numbers in the same order.
template <CodeKind kKind>
MARLIN_HOST_DEVICE void EncodeWords(const uint8_t (&codes)[32], uint32_t* words) {
  constexpr int kWords = CodeBits(kKind);
  for (int i = 0; i < kWords; ++i) words[i] = 0;
  for (int i = 0; i < 32; ++i) {
    const uint32_t code = codes[i];
    const int step = i / 8;
    const int place = i % 8;
    if constexpr (kKind == CodeKind::kFp4) {
      words[step] |= PlaceFp4(code, place / 2) << (16 * (place % 2));
    } else if constexpr (kKind == CodeKind::kInt4) {
      words[step] |= code << (4 * (place / 2) + 16 * (place % 2));
    } else if constexpr (kKind == CodeKind::kTable4) {
      words[step] |= code << (4 * place);
    } else if constexpr (kKind == CodeKind::kTable2) {
      words[step / 2] |= code << (4 * place + 2 * (step % 2));
    } else if constexpr (kKind == CodeKind::kTable3) {
      words[step / 2] |= (code & 3u) << (4 * place + 2 * (step % 2));
      words[2] |= (code >> 2) << (4 * place + step);
    } else {
      words[2 * step + place / 4] |= code << (8 * (place % 4));
    }
  }
}

/// Code `i` of a lane's words: the inverse of EncodeWords.
MARLIN_HOST_DEVICE uint32_t CodeOf(CodeKind kind, const uint32_t* words, int i) {
  const int step = i / 8;
  const int place = i % 8;
  switch (kind) {
    case CodeKind::kFp4:
      return TakeFp4((words[step] >> (16 * (place % 2))) & 0xffffu, place / 2);
    case CodeKind::kInt4:
      return (words[step] >> (4 * (place / 2) + 16 * (place % 2))) & 15u;
    case CodeKind::kTable4:
      return (words[step] >> (4 * place)) & 15u;
    case CodeKind::kTable2:
      return (words[step / 2] >> (4 * place + 2 * (step % 2))) & 3u;
    case CodeKind::kTable3:
      return ((words[step / 2] >> (4 * place + 2 * (step % 2))) & 3u) |
             (((words[2] >> (4 * place + step)) & 1u) << 2);
    default:
      return (words[2 * step + place / 4] >> (8 * (place % 4))) & 255u;
  }
}

/// What a kernel keeps in registers to decode: table planes or an offset.
template <CodeKind kKind, typename T>
struct DecodeTable {
  static constexpr int kEntries = kKind == CodeKind::kTable4   ? 4
                                  : kKind == CodeKind::kTable3 ? 2
                                  : kKind == CodeKind::kTable2 ? 1
                                                               : 0;
  uint32_t low[kEntries == 0 ? 1 : kEntries];
  uint32_t high[kEntries == 0 ? 1 : kEntries];
  uint32_t offset;  ///< kInt4: magic + offset, twice. kDense16: whether numbers are of type T.

  MARLIN_DEVICE explicit DecodeTable(const TileView& view) {
    low[0] = high[0] = offset = 0;
    if constexpr (kEntries > 0) {
      const uint32_t* planes = view.table + (T::kIsBf16 ? 0 : 8);
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        low[i] = planes[i];
        high[i] = planes[4 + i];
      }
    } else if constexpr (kKind == CodeKind::kInt4) {
      // magic + offset is exact: both are small integers.
      const float magic = T::kIsBf16 ? 128.0f : 1024.0f;
      const float value = magic + static_cast<float>(view.offset);
      offset = T::Pack(value, value);
    } else if constexpr (kKind == CodeKind::kDense16) {
      offset = view.bf16_codes == T::kIsBf16 ? 1u : 0u;
    }
  }
};

/// Four values of a table of 16, 8 or 4 as low and high bytes; selectors are the nibbles of `codes`.
template <int kEntries>
MARLIN_DEVICE uint32_t LookUp4(const uint32_t (&plane)[kEntries], uint32_t codes, uint32_t choose) {
  if constexpr (kEntries == 4) {
    const uint32_t below = __byte_perm(plane[0], plane[1], codes);
    const uint32_t above = __byte_perm(plane[2], plane[3], codes);
    return __byte_perm(below, above, choose);
  } else if constexpr (kEntries == 2) {
    return __byte_perm(plane[0], plane[1], codes);
  } else {
    return __byte_perm(plane[0], 0, codes);
  }
}

template <CodeKind kKind, typename T>
struct FragmentDecoder {
  static constexpr int kWords = CodeBits(kKind);
  using Table = DecodeTable<kKind, T>;

  /// The fragment of step `j` (a constant after unrolling), values x 2^ExponentsOf().decode.
  static MARLIN_DEVICE void Decode(const uint32_t (&words)[kWords], int j, const Table& table,
                                   uint32_t (&pairs)[4]) {
    if constexpr (kKind == CodeKind::kFp4) {
      DecodeFp4(words[j], pairs);
    } else if constexpr (kKind == CodeKind::kInt4) {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const uint32_t biased = AndOr(words[j] >> (4 * p), 0x000f000fu, T::kMagic);
        pairs[p] = T::Subtract(biased, table.offset);
      }
    } else if constexpr (Table::kEntries > 0) {
      DecodeTableCodes(Nibbles(words, j), table, pairs);
    } else if constexpr (kKind == CodeKind::kDense16) {
#pragma unroll
      for (int p = 0; p < 4; ++p) pairs[p] = Convert16(words[4 * j + p], table.offset != 0);
    } else {
#pragma unroll
      for (int p = 0; p < 4; ++p) pairs[p] = DecodeBytes(words[2 * j + p / 2], p % 2);
    }
  }

 private:
  static MARLIN_DEVICE void DecodeFp4(uint32_t w, uint32_t (&pairs)[4]) {
    if constexpr (T::kIsBf16) {
      constexpr uint32_t kMask = 0x81c081c0u;
      pairs[0] = w & kMask;
      pairs[1] = (w << 3) & kMask;
      pairs[2] = (w << 6) & kMask;
      const uint32_t low = AndOr(w >> 4, 0x00c000c0u, (w >> 5) & 0x01000100u);
      pairs[3] = AndOr(w << 1, 0x80008000u, low);
    } else {
      constexpr uint32_t kSign = 0x80008000u;
      constexpr uint32_t kMagnitude = 0x0e000e00u;
      pairs[0] = AndOr(w, kSign, (w << 3) & kMagnitude);
      pairs[1] = AndOr(w << 3, kSign, (w << 6) & kMagnitude);
      pairs[2] = AndOr(w << 6, kSign, (w << 9) & kMagnitude);
      const uint32_t low = AndOr(w >> 1, 0x06000600u, (w >> 2) & 0x08000800u);
      pairs[3] = AndOr(w << 1, kSign, low);
    }
  }

  /// The codes of step j as nibbles.
  static MARLIN_DEVICE uint32_t Nibbles(const uint32_t (&words)[kWords], int j) {
    if constexpr (kKind == CodeKind::kTable4) {
      return words[j];
    } else {
      const uint32_t low = (words[j / 2] >> (2 * (j % 2))) & 0x33333333u;
      if constexpr (kKind == CodeKind::kTable2) {
        return low;
      } else {
        const uint32_t high = j <= 2 ? words[2] << (2 - j) : words[2] >> (j - 2);
        return AndOr(high, 0x44444444u, low);
      }
    }
  }

  static MARLIN_DEVICE void DecodeTableCodes(uint32_t codes, const Table& table,
                                             uint32_t (&pairs)[4]) {
    // Bit 3 of a selector would spread a sign; of 16 values it chooses the upper eight instead.
    uint32_t choose = 0;
    if constexpr (Table::kEntries == 4) {
      choose = AndOr(codes >> 1, 0x44444444u, 0x32103210u);
      codes &= 0x77777777u;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t some = codes >> (16 * half);
      const uint32_t which = choose >> (16 * half);
      const uint32_t low = LookUp4(table.low, some, which);
      const uint32_t high = LookUp4(table.high, some, which);
      pairs[2 * half] = __byte_perm(low, high, 0x5140);
      pairs[2 * half + 1] = __byte_perm(low, high, 0x7362);
    }
  }

  /// Bytes 2 `which` and 2 `which` + 1 of a word.
  static MARLIN_DEVICE uint32_t DecodeBytes(uint32_t word, int which) {
    if constexpr (kKind == CodeKind::kInt8) {
      // 2^23 + byte as a float, minus 2^23 + 128.
      const uint32_t low = __byte_perm(word, 0x4b000000u, which == 0 ? 0x7440 : 0x7442);
      const uint32_t high = __byte_perm(word, 0x4b000000u, which == 0 ? 0x7441 : 0x7443);
      return T::Pack(__uint_as_float(low) - 8388736.0f, __uint_as_float(high) - 8388736.0f);
    } else {
      // Each byte at the top of its half.
      const uint32_t top = __byte_perm(word, 0, which == 0 ? 0x1404 : 0x3424);
      constexpr int kDown = kKind == CodeKind::kE4M3 ? (T::kIsBf16 ? 4 : 1) : (T::kIsBf16 ? 3 : 0);
      constexpr uint32_t kMagnitude = (0x7f00u >> kDown) * 0x00010001u;
      if constexpr (kDown == 0) {
        return top;
      } else {
        return AndOr(top, 0x80008000u, (top >> kDown) & kMagnitude);
      }
    }
  }

  static MARLIN_DEVICE uint32_t Convert16(uint32_t pair, bool same) {
    if (same) return pair;
    const float2 values = T::kIsBf16 ? F16::Unpack(pair) : Bf16::Unpack(pair);
    return T::Pack(values.x, values.y);
  }
};

/// Scales and offsets of two rows of a fragment for one group, each twice in a register:
/// weight = decoded x scale + offset.
template <typename T>
struct GroupOperands {
  uint32_t scale[2];
  uint32_t offset[2];
};

/// A pair of stored parameters as floats.
MARLIN_DEVICE float2 LoadParameters(uint32_t pair, bool bf16) {
  return bf16 ? Bf16::Unpack(pair) : F16::Unpack(pair);
}

/// What of a view turns stored parameters into operands.
struct ParameterKind {
  bool bf16;
  int zero_kind;
  float offset_unit;  ///< Of zero x scale and of biases: 2^-(shift + table exponent).
};

/// From the stored pairs {row g, row g + 8}: scales, and zeros or biases as the kind says.
template <CodeKind kKind, typename T>
MARLIN_DEVICE GroupOperands<T> MakeOperands(uint32_t scales, uint32_t zeros,
                                            const ParameterKind& kind) {
  constexpr CodeExponents kExponents = ExponentsOf(kKind, T::kIsBf16);
  constexpr float kScale = PowerOfTwo(-kExponents.decode - kExponents.shift);
  GroupOperands<T> operands;
  const float2 scale = LoadParameters(scales, kind.bf16);
  float2 offset = {0.0f, 0.0f};
  if (kind.zero_kind == 1) {
    const float2 zero = F16::Unpack(zeros);
    offset = {-(zero.x * scale.x) * kind.offset_unit, -(zero.y * scale.y) * kind.offset_unit};
  } else if (kind.zero_kind == 2) {
    const float2 bias = LoadParameters(zeros, kind.bf16);
    offset = {bias.x * kind.offset_unit, bias.y * kind.offset_unit};
  }
  const uint32_t packed = T::Pack(scale.x * kScale, scale.y * kScale);
  operands.scale[0] = SpreadLow(packed);
  operands.scale[1] = SpreadHigh(packed);
  const uint32_t packed_offset = T::Pack(offset.x, offset.y);
  operands.offset[0] = SpreadLow(packed_offset);
  operands.offset[1] = SpreadHigh(packed_offset);
  return operands;
}

template <CodeKind kKind, typename T>
MARLIN_DEVICE ParameterKind ParameterKindOf(const TileView& view) {
  const int exponent = ExponentsOf(kKind, T::kIsBf16).shift + view.table_exponent;
  return {view.bf16_parameters, view.zero_kind, exp2f(static_cast<float>(-exponent))};
}

/// Decodes a fragment and applies its group's scales. Pairs 0 and 2 are of row g, 1 and 3 of g + 8.
template <CodeKind kKind, typename T>
MARLIN_DEVICE void DecodeScaled(const uint32_t (&words)[CodeBits(kKind)], int j,
                                const DecodeTable<kKind, T>& table,
                                const GroupOperands<T>& operands, uint32_t (&pairs)[4]) {
  FragmentDecoder<kKind, T>::Decode(words, j, table, pairs);
  if constexpr (kKind != CodeKind::kDense16) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      pairs[p] = T::Fma(pairs[p], operands.scale[p & 1], operands.offset[p & 1]);
    }
  }
}

}  // namespace marlin::cuda
