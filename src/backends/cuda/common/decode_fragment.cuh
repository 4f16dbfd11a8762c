// Decodes the words of a tile into MMA fragments. The one place that knows how each kind of code is
// packed into words (EncodeWords) and unpacked (FragmentDecoder, CodeOf); a test decodes every code
// of every kind both ways.
#pragma once

#include "backends/cuda/common/fragment_math.cuh"
#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// FP4 words are encoded so that shifts, XORs and one mask give the four pairs, with
/// each code as {sign, e1 e0 m} at bits {15, 8..6} of its half: a bf16 number of value x 2^-126.
/// The map from words to those 32 bits is linear over GF(2) and has an inverse, which encodes.
/// Another map would save e4m3 one instruction (SplitFp4ToBytes); the one that was tried made
/// 16-bit GEMMs no faster.
constexpr uint32_t kFp4Mask = 0x81c081c0u;
MARLIN_HOST_DEVICE constexpr uint32_t RotateLeft(uint32_t word, int by) {
#if defined(__CUDA_ARCH__)
  if (!__builtin_is_constant_evaluated()) return __funnelshift_l(word, word, by);
#endif
  return (word << by) | (word >> (32 - by));
}
struct Fp4Pairs {
  uint32_t pair[4];
};
MARLIN_HOST_DEVICE constexpr Fp4Pairs SplitFp4(uint32_t word) {
  const uint32_t up = word << 2;
  return {{word & kFp4Mask, RotateLeft(word, 28) & kFp4Mask, (up ^ (word << 6)) & kFp4Mask,
           (up ^ RotateLeft(word, 8)) & kFp4Mask}};
}
/// The code in half `half` of a pair.
MARLIN_HOST_DEVICE constexpr uint32_t TakeFp4(uint32_t pair, int half) {
  const uint32_t bits = pair >> (16 * half);
  return ((bits >> 12) & 8u) | ((bits >> 6) & 7u);
}

/// word[8 p + 4 h + b] decodes to bit b of code 2 p + h alone.
struct Fp4Inverse {
  uint32_t word[32];
};
constexpr Fp4Inverse InvertFp4() {
  // Gauss-Jordan over GF(2): row t is {word bits whose sum is decoded bit t} | unit vector t.
  uint64_t rows[32] = {};
  for (int t = 0; t < 32; ++t) rows[t] = uint64_t{1} << (32 + t);
  for (int j = 0; j < 32; ++j) {
    for (int t = 0; t < 32; ++t) {
      const Fp4Pairs decoded = SplitFp4(uint32_t{1} << j);
      if (((TakeFp4(decoded.pair[t / 8], t / 4 % 2) >> (t % 4)) & 1u) != 0) {
        rows[t] |= uint64_t{1} << j;
      }
    }
  }
  for (int c = 0; c < 32; ++c) {
    int pivot = c;
    while (((rows[pivot] >> c) & 1u) == 0) ++pivot;
    const uint64_t row = rows[pivot];
    rows[pivot] = rows[c];
    rows[c] = row;
    for (int r = 0; r < 32; ++r) {
      if (r != c && ((rows[r] >> c) & 1u) != 0) rows[r] ^= row;
    }
  }
  Fp4Inverse inverse = {};
  for (int t = 0; t < 32; ++t) {
    for (int c = 0; c < 32; ++c) {
      if (((rows[c] >> (32 + t)) & 1u) != 0) inverse.word[t] |= uint32_t{1} << c;
    }
  }
  return inverse;
}

/// Packs one lane's 32 codes (k16 step j, pair p, half h at 8 j + 2 p + h) into words; 16-bit kinds
/// are not packed: their words are the numbers in the same order.
template <CodeKind kKind>
MARLIN_HOST_DEVICE void EncodeWords(const uint8_t (&codes)[32], uint32_t* words) {
  constexpr int kWords = CodeBits(kKind);
  for (int i = 0; i < kWords; ++i) words[i] = 0;
  for (int i = 0; i < 32; ++i) {
    const uint32_t code = codes[i];
    const int step = i / 8;
    const int place = i % 8;
    if constexpr (kKind == CodeKind::kFp4) {
      constexpr Fp4Inverse kInverse = InvertFp4();
      for (int b = 0; b < 4; ++b) {
        if (((code >> b) & 1u) != 0) words[step] ^= kInverse.word[4 * place + b];
      }
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
      return TakeFp4(SplitFp4(words[step]).pair[place / 2], place % 2);
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

/// Decoding state that a kernel keeps in registers, such as the byte planes of a table.
template <CodeKind kKind, typename T>
struct DecodeTable {
  static constexpr int kEntries = kKind == CodeKind::kTable4   ? 4
                                  : kKind == CodeKind::kTable3 ? 2
                                  : kKind == CodeKind::kTable2 ? 1
                                                               : 0;
  uint32_t low[kEntries == 0 ? 1 : kEntries];
  uint32_t high[kEntries == 0 ? 1 : kEntries];
  uint32_t same;  ///< kDense16: whether the numbers are of type T. kInt8: the offset in every byte.

  MARLIN_DEVICE explicit DecodeTable(const TileView& view) {
    low[0] = high[0] = same = 0;
    if constexpr (kEntries > 0) {
      const uint32_t* planes = view.table + (T::kIsBf16 ? 0 : 8);
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        low[i] = planes[i];
        high[i] = planes[4 + i];
      }
    } else if constexpr (kKind == CodeKind::kDense16) {
      same = view.bf16_codes == T::kIsBf16 ? 1u : 0u;
    } else if constexpr (kKind == CodeKind::kInt8) {
      same = static_cast<uint32_t>(view.offset) * 0x01010101u;
    }
  }
};

/// One byte plane of four values of a table of 16, 8 or 4. The nibbles of `codes` are the PRMT
/// selectors; `choose` selects between the lower and the upper eight of 16.
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

/// The codes of k16 step j as nibbles, for kinds with a table.
template <CodeKind kKind>
MARLIN_DEVICE uint32_t CodeNibbles(const uint32_t (&words)[CodeBits(kKind)], int j) {
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

/// A shared-memory LUT for tables of 16 values: the pairs of values of all 256 pairs of codes, with
/// a copy for every lane, so that lookups have no bank conflicts.
template <typename T>
struct SharedPairTable {
  uint32_t column;  ///< Address of this lane's copy of the first pair.

  MARLIN_DEVICE explicit SharedPairTable(uint32_t base) : column(base + (threadIdx.x & 31) * 4) {}

  /// Called by all threads of the CTA; __syncthreads() has to follow.
  static MARLIN_DEVICE void Fill(uint32_t base, const TileView& view);

  MARLIN_DEVICE uint32_t Pair(uint32_t codes, int which) const {
    const uint32_t pair = __byte_perm(codes, 0, 0x4440 + which);
    uint32_t values;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(values) : "r"(column + pair * 128));
    return values;
  }
};

template <CodeKind kKind, typename T>
struct FragmentDecoder {
  static constexpr int kWords = CodeBits(kKind);
  using Table = DecodeTable<kKind, T>;

  /// The same as below, from a LUT in shared memory.
  static MARLIN_DEVICE void Decode(const uint32_t (&words)[kWords], int j,
                                   const SharedPairTable<T>& table, const uint32_t (&)[2],
                                   uint32_t (&pairs)[4]) {
#pragma unroll
    for (int p = 0; p < 4; ++p) pairs[p] = table.Pair(words[j], p);
  }

  /// The fragment of k16 step `j` (a constant after unrolling), values x 2^ExponentsOf().decode.
  /// For kInt4, `offset` (magic + offset or integer zero of rows g and g + 8) is subtracted.
  static MARLIN_DEVICE void Decode(const uint32_t (&words)[kWords], int j, const Table& table,
                                   const uint32_t (&offset)[2], uint32_t (&pairs)[4]) {
    if constexpr (kKind == CodeKind::kFp4) {
      DecodeFp4(words[j], pairs);
    } else if constexpr (kKind == CodeKind::kInt4) {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const uint32_t biased = AndOr(words[j] >> (4 * p), 0x000f000fu, T::kMagic);
        pairs[p] = T::Subtract(biased, offset[p & 1]);
      }
    } else if constexpr (Table::kEntries > 0) {
      DecodeTableCodes(CodeNibbles<kKind>(words, j), table, pairs);
    } else if constexpr (kKind == CodeKind::kDense16) {
#pragma unroll
      for (int p = 0; p < 4; ++p) pairs[p] = Convert16(words[4 * j + p], table.same != 0);
    } else {
#pragma unroll
      for (int p = 0; p < 4; ++p) pairs[p] = DecodeBytes(words[2 * j + p / 2], p % 2, table);
    }
  }

 private:
  static MARLIN_DEVICE void DecodeFp4(uint32_t word, uint32_t (&pairs)[4]) {
    const Fp4Pairs split = SplitFp4(word);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      pairs[p] = split.pair[p];
      // fp16 has three more mantissa bits, so the same fields are 3 bits higher.
      if (!T::kIsBf16) pairs[p] = AndOr(pairs[p], 0x80008000u, (pairs[p] << 3) & 0x0e000e00u);
    }
  }

  static MARLIN_DEVICE void DecodeTableCodes(uint32_t codes, const Table& table,
                                             uint32_t (&pairs)[4]) {
    // Bit 3 of a PRMT selector replicates the sign bit, so it is cleared; with 16 values it selects
    // the upper eight instead.
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

  /// Decodes bytes 2 `which` and 2 `which` + 1 of a word.
  static MARLIN_DEVICE uint32_t DecodeBytes(uint32_t word, int which, const Table& table) {
    if constexpr (kKind == CodeKind::kInt8) {
      // Two's complement to offset binary; 2^23 + byte as a float, minus 2^23 + offset.
      word ^= table.same;
      const float magic = __uint_as_float(0x4b000000u | (table.same & 0xffu));
      const uint32_t low = __byte_perm(word, 0x4b000000u, which == 0 ? 0x7440 : 0x7442);
      const uint32_t high = __byte_perm(word, 0x4b000000u, which == 0 ? 0x7441 : 0x7443);
      return T::Pack(__uint_as_float(low) - magic, __uint_as_float(high) - magic);
    } else {
      // Puts each byte at the top of its half.
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
    const float2 values = T::kIsBf16 ? F16x2::Unpack(pair) : Bf16x2::Unpack(pair);
    return T::Pack(values.x, values.y);
  }
};

template <typename T>
MARLIN_DEVICE void SharedPairTable<T>::Fill(uint32_t base, const TileView& view) {
  const DecodeTable<CodeKind::kTable4, T> table(view);
  const uint32_t no_offset[2] = {0, 0};
  for (uint32_t pair = threadIdx.x; pair < 256; pair += blockDim.x) {
    const uint32_t words[4] = {pair, 0, 0, 0};
    uint32_t values[4];
    FragmentDecoder<CodeKind::kTable4, T>::Decode(words, 0, table, no_offset, values);
#pragma unroll 4
    for (uint32_t i = 0; i < 32; ++i) {
      // Threads of a warp write to different banks.
      const uint32_t lane = (i + threadIdx.x) & 31;
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(base + pair * 128 + lane * 4), "r"(values[0])
                   : "memory");
    }
  }
}

/// How codes and stored parameters become weights; uniform across the threads of a launch.
struct ParameterMode {
  bool bf16;
  ZeroKind extra;      ///< kNone for integer_zeros as well: those cost nothing.
  bool integer_zeros;  ///< kInt4: zeros are small integers, subtracted with the magic number.
  float offset;        ///< kInt4: magic + offset; otherwise 0.
  float unit;          ///< Biases: 2^-(shift + table_exponent); zeros: 2^(decode - table_exponent).
};

template <CodeKind kKind, typename T>
MARLIN_DEVICE ParameterMode ParameterModeOf(const TileView& view) {
  constexpr CodeExponents kExponents = ExponentsOf(kKind, T::kIsBf16);
  ParameterMode mode;
  mode.bf16 = view.bf16_parameters;
  mode.integer_zeros =
      kKind == CodeKind::kInt4 && view.zero_kind == ZeroKind::kZeros && view.integer_zeros;
  mode.extra = mode.integer_zeros ? ZeroKind::kNone : view.zero_kind;
  constexpr float kMagic = T::kIsBf16 ? 128.0f : 1024.0f;
  mode.offset = kKind == CodeKind::kInt4 ? kMagic + static_cast<float>(view.offset) : 0.0f;
  const int exponent = view.zero_kind == ZeroKind::kZeros ? kExponents.decode : -kExponents.shift;
  mode.unit = exp2f(static_cast<float>(exponent - view.table_exponent));
  return mode;
}

/// The operands of one group for rows g and g + 8 of a fragment, each in both halves of a register.
struct GroupOperands {
  uint32_t scale[2];
  uint32_t offset[2];  ///< Integer part of the zero; kInt4: with magic + offset added.
  uint32_t extra[2];   ///< Fractions of zeros, or biases.
};

/// A pair of stored parameters as floats.
MARLIN_DEVICE float2 LoadParameters(uint32_t pair, bool bf16) {
  return bf16 ? Bf16x2::Unpack(pair) : F16x2::Unpack(pair);
}

template <typename T>
MARLIN_DEVICE void Spread(float low, float high, uint32_t (&operands)[2]) {
  const uint32_t packed = T::Pack(low, high);
  operands[0] = SpreadLow(packed);
  operands[1] = SpreadHigh(packed);
}

/// Makes operands from the stored pairs {row g, row g + 8} of scales, and of zeros or biases.
template <CodeKind kKind, typename T, ParameterUse kUse>
MARLIN_DEVICE void MakeOperands(uint32_t scales, uint32_t zeros, const ParameterMode& mode,
                                GroupOperands& operands) {
  constexpr CodeExponents kExponents = ExponentsOf(kKind, T::kIsBf16);
  constexpr float kScale = PowerOfTwo(-kExponents.decode - kExponents.shift);
  // A branch costs more than it saves where a tile has one group.
  if (kUse != ParameterUse::kOneScale && mode.bf16 == T::kIsBf16) {
    // The scales have the operands' type: multiplying them by a power of two is exact.
    const uint32_t scaled = T::Multiply(scales, T::Pack(kScale, kScale));
    operands.scale[0] = SpreadLow(scaled);
    operands.scale[1] = SpreadHigh(scaled);
  } else {
    const float2 scale = LoadParameters(scales, mode.bf16);
    Spread<T>(scale.x * kScale, scale.y * kScale, operands.scale);
  }
  float2 zero = {0.0f, 0.0f};
  if (mode.integer_zeros || mode.extra == ZeroKind::kZeros) zero = F16x2::Unpack(zeros);
  // The integer part of a zero is subtracted first, which is exact; so code - zero keeps its
  // precision, and is 0 only where code equals zero.
  const float2 whole = {rintf(zero.x), rintf(zero.y)};
  if (kKind == CodeKind::kInt4 || (kUse == ParameterUse::kAll && mode.extra == ZeroKind::kZeros)) {
    const float unit = kKind == CodeKind::kInt4 ? 1.0f : mode.unit;
    Spread<T>(mode.offset + whole.x * unit, mode.offset + whole.y * unit, operands.offset);
  }
  if (kUse != ParameterUse::kAll) return;
  if (mode.extra == ZeroKind::kZeros) {
    Spread<T>((zero.x - whole.x) * mode.unit, (zero.y - whole.y) * mode.unit, operands.extra);
  } else if (mode.extra == ZeroKind::kBiases) {
    const float2 bias = LoadParameters(zeros, mode.bf16);
    Spread<T>(bias.x * mode.unit, bias.y * mode.unit, operands.extra);
  }
}

/// Applies a group's parameters to a decoded fragment. Pairs 0 and 2 belong to row g, 1 and 3 to
/// row g + 8.
template <CodeKind kKind, typename T, ParameterUse kUse>
MARLIN_DEVICE void ScaleFragment(const ParameterMode& mode, const GroupOperands& operands,
                                 uint32_t (&pairs)[4]) {
  if constexpr (kKind != CodeKind::kDense16) {
    if (kUse == ParameterUse::kAll && mode.extra == ZeroKind::kBiases) {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        pairs[p] = T::Fma(pairs[p], operands.scale[p & 1], operands.extra[p & 1]);
      }
      return;
    }
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      if (kUse == ParameterUse::kAll && mode.extra == ZeroKind::kZeros) {
        if (kKind != CodeKind::kInt4) pairs[p] = T::Subtract(pairs[p], operands.offset[p & 1]);
        pairs[p] = T::Subtract(pairs[p], operands.extra[p & 1]);
      }
      pairs[p] = T::Multiply(pairs[p], operands.scale[p & 1]);
    }
  }
}

/// Decodes a fragment and applies its group's parameters.
template <CodeKind kKind, typename T, ParameterUse kUse, typename Table>
MARLIN_DEVICE void DecodeScaled(const uint32_t (&words)[CodeBits(kKind)], int j, const Table& table,
                                const ParameterMode& mode, const GroupOperands& operands,
                                uint32_t (&pairs)[4]) {
  FragmentDecoder<kKind, T>::Decode(words, j, table, operands.offset, pairs);
  ScaleFragment<kKind, T, kUse>(mode, operands, pairs);
}

}  // namespace marlin::cuda
