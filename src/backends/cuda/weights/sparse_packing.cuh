// One lane's words of a sparse tile (layout/sparse_layout.h): on the device for Prepare, on the
// host for tests.
#pragma once

#include "backends/cuda/common/decode_fragment.cuh"
#include "backends/cuda/layout/sparse_layout.h"

namespace marlin::cuda {

/// A 4-bit number from words [along k, n], eight to a word, lowest first: kept code 2 block + which
/// of the values, or the nibble of a block of the metadata.
MARLIN_HOST_DEVICE uint32_t FourBitsAt(const uint32_t* words, int64_t columns, int i, int n) {
  return (words[i / 8 * columns + n] >> (i % 8 * 4)) & 15u;
}

/// Canonical 2:4 weights; `blocks` covers k rounded up to whole words of metadata.
struct SparseSource {
  const uint32_t* values;
  const uint32_t* metadata;
  int blocks;
  int n;
};

/// The words of 32 kept codes: outputs from `first_n`, blocks from `first_block`.
template <CodeKind kKind>
MARLIN_HOST_DEVICE void PackKept(const SparseSource& from, int lane, int first_block, int first_n,
                                 uint32_t (&words)[kSparseBits]) {
  uint8_t codes[32];
  for (int i = 0; i < 32; ++i) {
    const KeptPlace place = KeptPlaceOf(lane, i);
    const int block = first_block + place.block;
    const int n = first_n + place.output;
    const bool inside = block < from.blocks && n < from.n;
    codes[i] =
        inside ? static_cast<uint8_t>(FourBitsAt(from.values, from.n, 2 * block + place.which, n))
               : uint8_t{0};
  }
  EncodeWords<kKind>(codes, words);
}

/// The metadata word of a step.
MARLIN_HOST_DEVICE uint32_t PackNibbles(const SparseSource& from, int lane, int step,
                                        int first_block, int first_n) {
  uint32_t word = 0;
  for (int i = 0; i < 8; ++i) {
    const NibblePlace place = NibblePlaceOf(lane, step, i);
    const int block = first_block + place.block;
    const int n = first_n + place.output;
    const bool inside = block < from.blocks && n < from.n;
    word |= (inside ? FourBitsAt(from.metadata, from.n, block, n) : kPaddingNibble) << (4 * i);
  }
  return word;
}

}  // namespace marlin::cuda
