// One lane's words of a dense tile from a sparse one, on the device for kernels that read dense
// tiles and on the host for tests.
#pragma once

#include "backends/cuda/common/code_pairs.cuh"
#include "backends/cuda/layout/sparse_layout.h"

namespace marlin::cuda {

/// Four of the eight bytes of b, a (a is the lower half), a hexadecimal digit of `selector` each.
MARLIN_HOST_DEVICE uint32_t SelectBytes(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, selector);
#else
  const uint64_t bytes = a | static_cast<uint64_t>(b) << 32;
  uint32_t selected = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = (selector >> (4 * i)) & 7u;
    selected |= static_cast<uint32_t>((bytes >> (8 * byte)) & 255u) << (8 * i);
  }
  return selected;
#endif
}

/// A dense pair has codes 2 half and 2 half + 1 of a block of four. It is selected by SelectBytes
/// from the block's two kept codes (the pair `a`) and zeros (the pair `b`).
inline constexpr int kSelectorCount = 32;
/// Selector number nibble + 16 half.
MARLIN_HOST_DEVICE constexpr uint32_t SelectorOf(int number) {
  const int nibble = number % 16;
  uint32_t selector = 0;
  for (int h = 0; h < 2; ++h) {
    const int position = number / 16 * 2 + h;
    const uint32_t bytes = position == nibble >> 2    ? 0x32u
                           : position == (nibble & 3) ? 0x10u
                                                      : 0x54u;
    selector |= bytes << (8 * h);
  }
  return selector;
}

/// A pair of the code `zero`.
template <CodeKind kKind>
MARLIN_HOST_DEVICE uint32_t PairOf(uint32_t zero) {
  uint8_t codes[32];
  for (uint8_t& code : codes) code = static_cast<uint8_t>(zero);
  uint32_t words[kSparseBits];
  EncodeWords<kKind>(codes, words);
  uint32_t pairs[4];
  SplitPairs<kKind>(words[0], pairs);
  return pairs[0];
}

/// The words that lane 4 g + t needs of 16 outputs (r) of a sparse tile: 128 k of outputs g and g
/// + 8.
struct SparseLane {
  uint32_t kept[2][kStepsOfTile];      ///< Words of lanes 4 g + t / 2 and two more.
  uint32_t metadata[2][kStepsOfTile];  ///< Words of lanes 4 g + 2 r and one more.
};

/// The two words of lane 4 g + t in the dense fragment blocks of 32 k, from the words of that step
/// in a SparseLane. Of each of its blocks of four it has the codes of k = 2 (t & 1) and the next;
/// `zeros` (PairOf) stands for pruned ones. `selectors` returns SelectorOf of half its argument,
/// which is an offset in bytes: a load then needs no other address.
template <CodeKind kKind, typename Selectors>
MARLIN_HOST_DEVICE void ExpandStep(const uint32_t (&from)[2], const uint32_t (&metadata)[2], int t,
                                   uint32_t zeros, const Selectors& selectors,
                                   uint32_t (&words)[2]) {
  // Twice the nibble of the lane's block in every byte, and then 16 half's.
  const int rotate = t / 2 == 0 ? 1 : 29;
  const uint32_t of_half = static_cast<uint32_t>(t & 1) * 0x20202020u;
  uint32_t kept[2][4];
  SplitPairs<kKind>(from[0], kept[0]);
  SplitPairs<kKind>(from[1], kept[1]);
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {  // Fragments are 16 k.
    const uint32_t offsets = (RotateLeft(metadata[odd], rotate) & 0x1e1e1e1eu) | of_half;
    uint32_t pairs[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const int row = p % 2;    // Output g or g + 8.
      const int eight = p / 2;  // Which 8 k of the fragment.
      const uint32_t selector = selectors((offsets >> (16 * row + 8 * eight)) & 255u);
      pairs[p] = SelectBytes(kept[eight][2 * odd + row], zeros, selector);
    }
    words[odd] = JoinPairs<kKind>(pairs);
  }
}

/// The words of lane 4 g + t in the dense fragment blocks of both halves of 128 k, by ExpandStep.
template <CodeKind kKind, typename Selectors>
MARLIN_HOST_DEVICE void ExpandLane(const SparseLane& from, int t, uint32_t zeros,
                                   const Selectors& selectors, uint32_t (&words)[2 * kSparseBits]) {
#pragma unroll
  for (int step = 0; step < kStepsOfTile; ++step) {
    const uint32_t kept[2] = {from.kept[0][step], from.kept[1][step]};
    const uint32_t metadata[2] = {from.metadata[0][step], from.metadata[1][step]};
    uint32_t expanded[2];
    ExpandStep<kKind>(kept, metadata, t, zeros, selectors, expanded);
    words[2 * step] = expanded[0];
    words[2 * step + 1] = expanded[1];
  }
}

}  // namespace marlin::cuda
