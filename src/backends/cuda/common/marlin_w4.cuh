// The marlin_w4 layout (docs/formats/marlin_w4.md) on the device: decodes its words into MMA
// fragments and into single weights.
//
//   [K/32][N/32][32 lanes][4 words]; word w of a lane belongs to the 16 x 16 tile (w / 2 along k,
//   w % 2 along n) and holds exactly the lane's part of an m16n8k16 A fragment of W^T:
//
//     nibble     0      1      2      3      4      5      6      7
//     k        2 t    2 t+8   2 t    2 t+8  2 t+1  2 t+9  2 t+1  2 t+9      g = lane / 4
//     output     g      g     g+8    g+8      g      g     g+8    g+8       t = lane % 4
//     pair       0      2      1      3       0      2      1      3
//     half      low                         high
#pragma once

#include "backends/cuda/common/decode_fragment.cuh"
#include "backends/cuda/common/weight_reader.cuh"

namespace marlin::cuda {

constexpr int kW4Block = 32;  ///< Extent of a block of the layout along k and along n.
constexpr int kW4LaneWords = 4;
constexpr int kW4BlockWords = 32 * kW4LaneWords;
/// Parameter bytes of one group of 32 outputs.
constexpr int kW4GroupBytes = kW4Block * 2;

/// The pair in nibbles q and q + 4 of a word.
MARLIN_DEVICE constexpr int PairOfNibble(int q) { return (q & 1) * 2 + (q >> 1); }

/// A word's nibbles in the order of pairs: code h of pair p at 4 (2 p + h).
MARLIN_DEVICE uint32_t InOrderOfPairs(uint32_t word) {
  // Bytes of codes: pairs 0 and 1 in even nibbles, 2 and 3 in odd ones; halves 16 bits apart.
  const uint32_t even = word & 0x0f0f0f0fu;
  const uint32_t odd = (word >> 4) & 0x0f0f0f0fu;
  return __byte_perm(even | (even >> 12), odd | (odd >> 12), 0x5410);
}

/// Decodes the fragment in a word, as FragmentDecoder::Decode does.
template <CodeKind kKind, typename T>
MARLIN_DEVICE void DecodeW4(uint32_t word, const DecodeTable<kKind, T>& table,
                            const uint32_t (&offset)[2], uint32_t (&pairs)[4]) {
  if constexpr (kKind == CodeKind::kTable4) {
    const uint32_t words[4] = {InOrderOfPairs(word), 0, 0, 0};
    FragmentDecoder<kKind, T>::Decode(words, 0, table, offset, pairs);
  } else {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int p = PairOfNibble(q);
      const uint32_t codes = word >> (4 * q);
      if constexpr (kKind == CodeKind::kInt4) {
        pairs[p] = T::Subtract(AndOr(codes, 0x000f000fu, T::kMagic), offset[p & 1]);
      } else {
        // Sign in the top bit; exponent and mantissa where the smallest numbers of T have them.
        constexpr int kUp = T::kIsBf16 ? 6 : 9;
        constexpr uint32_t kMagnitude = (7u << kUp) * 0x00010001u;
        pairs[p] = AndOr(codes << 12, 0x80008000u, (codes << kUp) & kMagnitude);
      }
    }
  }
}

/// Reads single weights.
struct MarlinW4Reader {
  MarlinW4View weights;
  TileView view;  ///< weights.codes

  MARLIN_DEVICE float Weight(int k, int n) const {
    const int strips = (view.n + kW4Block - 1) / kW4Block;
    const int64_t block = static_cast<int64_t>(k / kW4Block) * strips + n / kW4Block;
    const int lane = n % 8 * 4 + k % 8 / 2;
    const int word = k % kW4Block / 16 * 2 + n % kW4Block / 16;
    const int nibble = k % 16 / 8 + n % 16 / 8 * 2 + k % 2 * 4;
    const auto* words = reinterpret_cast<const uint32_t*>(view.tiles);
    const uint32_t code =
        (words[block * kW4BlockWords + lane * kW4LaneWords + word] >> (4 * nibble)) & 15u;

    const int64_t group = k / weights.group_size;
    const int place = n % 8 * 4 + n % kW4Block / 8;
    const auto* parameters =
        reinterpret_cast<const uint16_t*>(weights.parameters +
                                          (group * strips + n / kW4Block) * kW4GroupBytes) +
        place;
    const int64_t to_second = static_cast<int64_t>(weights.groups) * strips * kW4Block;
    return WeightOf(view, view.values[code],
                    ParametersOf(view, *parameters,
                                 view.zero_kind == ZeroKind::kNone ? 0 : parameters[to_second]));
  }
};

}  // namespace marlin::cuda
