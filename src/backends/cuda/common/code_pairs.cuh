// Takes words of eight 4-bit codes apart into pairs and puts them together again, by the encodings
// of decode_fragment.cuh, without going through single codes. Tests compare both with EncodeWords.
#pragma once

#include "backends/cuda/common/decode_fragment.cuh"

namespace marlin::cuda {

/// The word whose pairs SplitFp4 returns: its equations, solved for the word.
MARLIN_HOST_DEVICE constexpr uint32_t JoinFp4(const uint32_t (&pairs)[4]) {
  const uint32_t up = pairs[0] << 2;
  uint32_t word = pairs[0] | RotateLeft(pairs[1], 4);
  // Pair 3 is a sum of two bits of the word, of which pair 0 has one, except for the lowest bits of
  // its codes.
  const uint32_t third = pairs[3] ^ up ^ RotateLeft(pairs[0], 8);
  word |= ((third >> 2) & 0x20202020u) | ((third >> 8) & 0x00010001u);
  // So is pair 2, whose other bits are now known.
  const uint32_t known = (third & 0x80808080u) | (up & 0x01000100u);
  const uint32_t second = (pairs[2] ^ known) & 0x81808180u;
  const uint32_t lowest = (pairs[2] ^ (third >> 2)) & 0x00400040u;
  word |= (second >> 6) | (lowest >> 2);
  return word | RotateLeft((pairs[3] ^ lowest) & 0x00400040u, 24);
}

/// The four pairs of a word of 4-bit codes: half h of pair p is code 2 p + h, at bits of the half
/// that depend on the kind only; all other bits are 0.
template <CodeKind kKind>
MARLIN_HOST_DEVICE void SplitPairs(uint32_t word, uint32_t (&pairs)[4]) {
  static_assert(kKind == CodeKind::kFp4 || kKind == CodeKind::kInt4 || kKind == CodeKind::kTable4);
  if constexpr (kKind == CodeKind::kFp4) {
    const Fp4Pairs split = SplitFp4(word);
    for (int p = 0; p < 4; ++p) pairs[p] = split.pair[p];
  } else if constexpr (kKind == CodeKind::kInt4) {
    for (int p = 0; p < 4; ++p) pairs[p] = (word >> (4 * p)) & 0x000f000fu;
  } else {
    for (int p = 0; p < 4; ++p) {
      const uint32_t codes = word >> (8 * p);
      pairs[p] = (codes & 0xfu) | ((codes << 12) & 0x000f0000u);
    }
  }
}

/// The inverse of SplitPairs.
template <CodeKind kKind>
MARLIN_HOST_DEVICE uint32_t JoinPairs(const uint32_t (&pairs)[4]) {
  static_assert(kKind == CodeKind::kFp4 || kKind == CodeKind::kInt4 || kKind == CodeKind::kTable4);
  if constexpr (kKind == CodeKind::kFp4) return JoinFp4(pairs);
  uint32_t word = 0;
  for (int p = 0; p < 4; ++p) {
    if constexpr (kKind == CodeKind::kInt4) {
      word |= pairs[p] << (4 * p);
    } else {
      word |= ((pairs[p] | (pairs[p] >> 12)) & 0xffu) << (8 * p);
    }
  }
  return word;
}

}  // namespace marlin::cuda
