// Decodes the words of a tile into e4m3 MMA fragments. They hold the values of the codes exactly:
// weights that are not exact in e4m3 are refused earlier (WeightTraits::fits_fp8).
//
//   A lane's k16 step of outputs g and g + 8 becomes one register for each output. The tile's
//   order, made for 16-bit numbers, gives lane 4 g + t the k 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of the
//   step; the instruction takes k 4 t to 4 t + 3. So byte b of a register stands for
//   Fp8Source(4 t + b) of the step, and the quantized activations have the same order.
#pragma once

#include "backends/cuda/common/decode_fragment.cuh"

namespace marlin::cuda {

/// Decoded values are code values x 2^this: FP4's bits are put where e4m3 has its exponent and
/// mantissa.
MARLIN_HOST_DEVICE constexpr int Fp8DecodeExponent(CodeKind kind) {
  return kind == CodeKind::kFp4 ? -6 : 0;
}

/// The k within a step of 16 that position `at` of a quantized step holds.
MARLIN_HOST_DEVICE constexpr int Fp8Source(int at) {
  const int low = at / 4 * 2;
  const int byte = at % 4;
  return low + byte / 2 + (byte % 2 == 0 ? 8 : 0);
}

/// Interleaves the low halves, {h0, h1}, of two registers, of k 2 t and of k 2 t + 8, into the
/// order of Fp8Source.
MARLIN_DEVICE uint32_t JoinFp8(uint32_t low, uint32_t high) {
  return __byte_perm(low, high, 0x1504);
}

/// The eight codes of an FP4 word: sign, two exponent bits and one mantissa bit at bits {7, 4..2}
/// of every byte. The same XORs as in SplitFp4, shifted to these bits and ordered so that a mask
/// and an XOR are one instruction.
MARLIN_HOST_DEVICE constexpr void SplitFp4ToBytes(uint32_t word, uint32_t (&rows)[2]) {
  constexpr uint32_t kOddValue = 0x1c001c00u;
  constexpr uint32_t kOddSign = 0x80008000u;
  constexpr uint32_t kEvenValue = 0x001c001cu;
  constexpr uint32_t kEvenSign = 0x00800080u;
  const uint32_t down2 = word >> 2;
  const uint32_t down6 = word >> 6;
  const uint32_t up4 = RotateLeft(word, 4);
  rows[0] = (down2 & (kEvenValue | kEvenSign)) ^ ((word << 2) & kEvenValue) ^ (down6 & kEvenSign) ^
            (up4 & kOddValue) ^ (word & kOddSign);
  rows[1] = ((down2 ^ up4) & kEvenValue) ^ (word & (kOddValue | kEvenSign)) ^ (down6 & kEvenSign) ^
            (RotateLeft(word, 28) & kOddSign);
}

/// Decoding state that a kernel keeps in registers.
template <CodeKind kKind>
struct Fp8Table {
  static constexpr int kEntries = kKind == CodeKind::kTable3   ? 2
                                  : kKind == CodeKind::kTable2 ? 1
                                                               : 0;
  uint32_t bytes[kEntries == 0 ? 1 : kEntries];  ///< The values as e4m3.
  float magic;  ///< kInt4: 2^10 + offset, subtracted together with the zero.

  MARLIN_DEVICE explicit Fp8Table(const TileView& view) {
    bytes[0] = 0;
    magic = 0.0f;
    if constexpr (kKind == CodeKind::kInt4) {
      magic = 1024.0f + static_cast<float>(view.offset);
    } else if constexpr (kEntries > 0) {
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        const uint32_t low = E4M3x4::FromFloats(view.values[4 * i], view.values[4 * i + 1]);
        const uint32_t high = E4M3x4::FromFloats(view.values[4 * i + 2], view.values[4 * i + 3]);
        bytes[i] = low | high << 16;
      }
    }
  }
};

template <CodeKind kKind>
struct Fp8Decoder {
  static constexpr int kWords = CodeBits(kKind);

  /// The registers of outputs g and g + 8 of k16 step `j` (a constant after unrolling). For kInt4,
  /// `offset` (for each output 2^10 + offset or integer zero, in both halves) is subtracted.
  static MARLIN_DEVICE void Decode(const uint32_t (&words)[kWords], int j,
                                   const Fp8Table<kKind>& table, const uint32_t (&offset)[2],
                                   uint32_t (&rows)[2]) {
    if constexpr (kKind == CodeKind::kFp4) {
      SplitFp4ToBytes(words[j], rows);
    } else if constexpr (kKind == CodeKind::kInt4) {
      uint32_t bytes[4];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const uint32_t biased = AndOr(words[j] >> (4 * p), 0x000f000fu, F16x2::kMagic);
        bytes[p] = E4M3x4::FromF16(F16x2::Subtract(biased, offset[p & 1]));
      }
      rows[0] = JoinFp8(bytes[0], bytes[2]);
      rows[1] = JoinFp8(bytes[1], bytes[3]);
    } else {
      // Bytes {pair 0 h0, h1, pair 1 h0, h1} and the same of pairs 2 and 3.
      const uint32_t codes = CodeNibbles<kKind>(words, j);
      const uint32_t low = LookUp4(table.bytes, codes, 0);
      const uint32_t high = LookUp4(table.bytes, codes >> 16, 0);
      rows[0] = JoinFp8(low, high);
      rows[1] = JoinFp8(low >> 16, high >> 16);
    }
  }
};

}  // namespace marlin::cuda
