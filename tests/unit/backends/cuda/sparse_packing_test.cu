// Proves the packing of 2:4 weights on the host: an emulation of mma.sp.m16n8k32 that follows the
// figures of the PTX specification multiplies packed tiles, and gets the products of the expanded
// weights.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <random>
#include <vector>

#include "backends/cuda/weights/expand_sparse.cuh"
#include "backends/cuda/weights/sparse_packing.cuh"

namespace marlin::cuda {
namespace {

constexpr uint32_t kNibbles[] = {4, 8, 9, 12, 13, 14};

/// Canonical 2:4 weights of random codes, and of random nibbles or one and the same.
struct Weights {
  int k;
  int n;
  std::vector<uint32_t> values;
  std::vector<uint32_t> metadata;

  Weights(int k_of, int n_of, uint32_t seed, uint32_t nibble = 0) : k(k_of), n(n_of) {
    std::mt19937 bits(seed);
    values.resize(static_cast<size_t>((k + 31) / 32 * 2 * n));
    for (uint32_t& word : values) word = bits();
    metadata.resize(static_cast<size_t>((k + 31) / 32 * n));
    for (uint32_t& word : metadata) {
      for (int i = 0; i < 8; ++i) word |= (nibble != 0 ? nibble : kNibbles[bits() % 6]) << (4 * i);
    }
  }

  SparseSource source() const { return {values.data(), metadata.data(), (k + 31) / 32 * 8, n}; }

  /// The code at (k, n) plus 1, or 0 where it is pruned or outside.
  int At(int row, int column) const {
    if (row >= (k + 31) / 32 * 32 || column >= n) return 0;
    const auto word = [&](const std::vector<uint32_t>& of, int i) {
      return of[static_cast<size_t>(i / 8 * n + column)] >> (i % 8 * 4) & 15u;
    };
    const uint32_t nibble = word(metadata, row / 4);
    for (int which = 0; which < 2; ++which) {
      const uint32_t position = which == 0 ? nibble & 3u : nibble >> 2;
      if (position == static_cast<uint32_t>(row % 4)) {
        return static_cast<int>(word(values, row / 4 * 2 + which)) + 1;
      }
    }
    return 0;
  }
};

/// The operands of all lanes of a warp.
using Fragment = std::array<std::array<std::array<int, 2>, 4>, 32>;  ///< [lane][register][half].
using Metadata = std::array<uint32_t, 32>;

/// A [16][32] of mma.sp.m16n8k32 with 16-bit elements. PTX: a register holds the two elements of a
/// chunk of four columns; row = group for registers 0 and 2, group + 8 for 1 and 3; the chunk's
/// first column = 4 x thread in group, + 16 for registers 2 and 3. Thread 2 F of a group gives the
/// metadata of columns 0 to 15, thread 2 F + 1 that of 16 to 31, for selector F; bits 0 to 15 are
/// those of row `group`, 16 to 31 those of row group + 8.
std::array<std::array<int, 32>, 16> DenseOperand(const Fragment& a, const Metadata& e,
                                                 int selector) {
  std::array<std::array<int, 32>, 16> dense = {};
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane >> 2;
    const int thread = lane & 3;
    for (int i = 0; i < 4; ++i) {
      const bool lower_rows = i % 2 == 1;
      const int first = thread * 4 + (i < 2 ? 0 : 16);
      const uint32_t word =
          e[static_cast<size_t>(4 * group + 2 * selector + (first >= 16 ? 1 : 0))];
      const uint32_t nibble = word >> ((lower_rows ? 16 : 0) + first % 16) & 15u;
      for (int half = 0; half < 2; ++half) {
        const uint32_t position = half == 0 ? nibble & 3u : nibble >> 2;
        dense[static_cast<size_t>(group + (lower_rows ? 8 : 0))][first + position] =
            a[static_cast<size_t>(lane)][static_cast<size_t>(i)][static_cast<size_t>(half)];
      }
    }
  }
  return dense;
}

/// Compares an A operand with the weights from (first_k, first_n). Padding has code 0 at
/// positions 0 and 1.
void ExpectOperand(const Weights& weights, const std::array<std::array<int, 32>, 16>& dense,
                   int first_k, int first_n) {
  for (int i = 0; i < 16 * 32; ++i) {
    const int k = first_k + i % 32;
    const int n = first_n + i / 32;
    const bool inside = k < (weights.k + 31) / 32 * 32 && n < weights.n;
    const int padding = i % 4 < 2 ? 1 : 0;
    ASSERT_EQ(dense[static_cast<size_t>(i / 32)][static_cast<size_t>(i % 32)],
              inside ? weights.At(k, n) : padding)
        << "k " << k << ", n " << n;
  }
}

/// Packs one tile as the device does and compares what its MMAs multiply with the weights.
template <CodeKind kKind>
void ExpectTile(const Weights& weights, int tile, int strip) {
  const SparseSource from = weights.source();
  for (int r = 0; r < 2; ++r) {
    uint32_t words[32][kSparseBits];
    for (int lane = 0; lane < 32; ++lane) {
      PackKept<kKind>(from, lane, tile * kBlocksOfTile, strip * kStripOutputs + 16 * r,
                      words[lane]);
    }
    for (int step = 0; step < kStepsOfTile; ++step) {
      Fragment a;
      Metadata e;
      for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 8; ++i) {
          a[static_cast<size_t>(lane)][static_cast<size_t>(i / 2)][static_cast<size_t>(i % 2)] =
              static_cast<int>(CodeOf(kKind, words[lane], 8 * step + i)) + 1;
        }
        e[static_cast<size_t>(lane)] =
            PackNibbles(from, lane, step, tile * kBlocksOfTile, strip * kStripOutputs);
      }
      ExpectOperand(weights, DenseOperand(a, e, r), tile * kTileK + step * kSparseStepK,
                    strip * kStripOutputs + 16 * r);
    }
  }
}

template <CodeKind kKind>
void ExpectAllTiles(const Weights& weights) {
  for (int tile = 0; tile < (weights.k + kTileK - 1) / kTileK; ++tile) {
    for (int strip = 0; strip < (weights.n + kStripOutputs - 1) / kStripOutputs; ++strip) {
      ExpectTile<kKind>(weights, tile, strip);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(SparsePacking, GivesSparseMmasTheWeights) {
  const Weights weights(256, 64, 1);
  ExpectAllTiles<CodeKind::kFp4>(weights);
  ExpectAllTiles<CodeKind::kInt4>(weights);
  ExpectAllTiles<CodeKind::kTable4>(weights);
}

TEST(SparsePacking, KeepsEveryPattern) {
  for (const uint32_t nibble : kNibbles) {
    ExpectAllTiles<CodeKind::kFp4>(Weights(128, 32, nibble, nibble));
  }
}

TEST(SparsePacking, PadsTails) {
  for (const int k : {1, 31, 33, 100, 130, 300}) {
    for (const int n : {1, 15, 17, 40}) {
      ExpectAllTiles<CodeKind::kFp4>(Weights(k, n, static_cast<uint32_t>(k * 100 + n)));
      if (HasFailure()) return;
    }
  }
}

/// The words that the device loads for a lane.
SparseLane LaneOf(const std::vector<uint32_t>& tile, int r, int lane) {
  const int first = lane / 4 * 4;
  SparseLane of;
  for (int which = 0; which < 2; ++which) {
    for (int step = 0; step < kStepsOfTile; ++step) {
      const int kept = WordOffset(kSparseBits, first + lane % 4 / 2 + 2 * which, step);
      of.kept[which][step] = tile[static_cast<size_t>(r * BlockBytes(kSparseBits) / 4 + kept)];
      of.metadata[which][step] = tile[static_cast<size_t>(
          kMetadataOffset / 4 + (first + 2 * r + which) * kStepsOfTile + step)];
    }
  }
  return of;
}

/// Expands one packed tile and compares the codes of its dense fragments with the weights.
template <CodeKind kKind>
void ExpectExpanded(const Weights& weights, uint32_t zero) {
  std::vector<uint32_t> tile(kSparseTileBytes / 4);
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < 2; ++r) {
      uint32_t words[kSparseBits];
      PackKept<kKind>(weights.source(), lane, 0, 16 * r, words);
      for (int i = 0; i < kSparseBits; ++i) {
        tile[static_cast<size_t>(r * BlockBytes(kSparseBits) / 4 +
                                 WordOffset(kSparseBits, lane, i))] = words[i];
      }
    }
    for (int step = 0; step < kStepsOfTile; ++step) {
      tile[static_cast<size_t>(kMetadataOffset / 4 + lane * kStepsOfTile + step)] =
          PackNibbles(weights.source(), lane, step, 0, 0);
    }
  }
  const auto selector = [](uint32_t offset) { return SelectorOf(static_cast<int>(offset / 2)); };
  for (int r = 0; r < 2; ++r) {
    for (int lane = 0; lane < 32; ++lane) {
      uint32_t words[2 * kSparseBits];
      ExpandLane<kKind>(LaneOf(tile, r, lane), lane % 4, PairOf<kKind>(zero), selector, words);
      for (int i = 0; i < 64; ++i) {
        // tile_layout.h
        const int pair = i % 8 / 2;
        const int n = 16 * r + lane / 4 + 8 * (pair & 1);
        const int k = 16 * (i / 8) + 2 * (lane % 4) + 8 * (pair >> 1) + i % 2;
        const int code = weights.At(k, n);
        ASSERT_EQ(CodeOf(kKind, words + i / 32 * kSparseBits, i % 32),
                  code == 0 ? zero : static_cast<uint32_t>(code - 1))
            << "k " << k << ", n " << n;
      }
    }
  }
}

TEST(SparsePacking, ExpandsToDenseTiles) {
  const Weights weights(128, 32, 5);
  ExpectExpanded<CodeKind::kFp4>(weights, 0);
  ExpectExpanded<CodeKind::kInt4>(weights, 8);
  ExpectExpanded<CodeKind::kTable4>(weights, 7);
  for (const uint32_t nibble : kNibbles) {
    ExpectExpanded<CodeKind::kFp4>(Weights(128, 32, nibble, nibble), 0);
  }
}

/// Pairs are what EncodeWords packed: every code at every place, among others at random.
template <CodeKind kKind>
void ExpectPairs() {
  std::mt19937 bits(9);
  for (uint32_t code = 0; code < 16; ++code) {
    for (int place = 0; place < 8; ++place) {
      uint8_t codes[32];
      for (uint8_t& other : codes) other = static_cast<uint8_t>(bits() & 15u);
      codes[place] = static_cast<uint8_t>(code);
      uint32_t words[kSparseBits];
      EncodeWords<kKind>(codes, words);
      uint32_t pairs[4];
      SplitPairs<kKind>(words[0], pairs);
      const uint32_t same = PairOf<kKind>(code);
      EXPECT_EQ(pairs[place / 2] >> (16 * (place % 2)) & 0xffffu, same & 0xffffu);
      EXPECT_EQ(same >> 16, same & 0xffffu);
      EXPECT_EQ(JoinPairs<kKind>(pairs), words[0]);
    }
  }
}

TEST(SparsePacking, SplitsAndJoinsPairs) {
  ExpectPairs<CodeKind::kFp4>();
  ExpectPairs<CodeKind::kInt4>();
  ExpectPairs<CodeKind::kTable4>();
}

}  // namespace
}  // namespace marlin::cuda
