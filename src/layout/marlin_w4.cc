// 4-bit tile layouts: marlin_w4, and the layouts of the original Marlin and of vLLM from which it
// descends.
//
// All three hold one word per (16x16 tile, lane): the eight codes that lane t of a warp feeds to an
// MMA with a 16x16 tile of B, rows 2 (t % 4) + {0, 1, 8, 9} of columns t / 4 + {0, 8}, interleaved
// 0 2 4 6 1 3 5 7. They differ in which four tiles a lane's four words come from.
#include <algorithm>
#include <string>

#include "base/checked.h"
#include "base/macros.h"
#include "marlin/layout.h"
#include "marlin/weights.h"

namespace marlin {
namespace {

constexpr int64_t kTile = 16;
constexpr int64_t kLanes = 32;
constexpr int64_t kWordsPerLane = 4;
constexpr int64_t kW4Block = 32;        ///< marlin_w4: 2 x 2 tiles.
constexpr int64_t kOriginalBlock = 64;  ///< Original Marlin: 1 x 4 tiles.

/// Position of a code in its 16x16 tile.
struct Place {
  int64_t row;
  int64_t column;
};

/// Position of the code in nibble `nibble` of lane `lane`'s word.
constexpr Place PlaceOf(int64_t lane, int nibble) {
  constexpr int kInterleave[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  constexpr int kRowOffsets[4] = {0, 1, 8, 9};
  const int i = kInterleave[nibble];
  return {2 * (lane % 4) + kRowOffsets[i % 4], lane / 4 + 8 * (i / 4)};
}

/// A matrix of k-packed 4-bit words; reads past its edges give code 0, writes there are dropped.
template <typename Word>
class KPackedCodes {
 public:
  KPackedCodes(int64_t k, int64_t n, Word* words) : k_(k), n_(n), words_(words) {}

  uint32_t Get(int64_t k, int64_t n) const {
    if (k >= k_ || n >= n_) return 0;
    return (words_[k / 8 * n_ + n] >> (4 * (k % 8))) & 15u;
  }
  /// Precondition: the code at that position is 0.
  void Put(int64_t k, int64_t n, uint32_t code) const {
    if (k < k_ && n < n_) words_[k / 8 * n_ + n] |= code << (4 * (k % 8));
  }

 private:
  int64_t k_;
  int64_t n_;
  Word* words_;
};

uint32_t GatherWord(const KPackedCodes<const uint32_t>& from, int64_t tile_k, int64_t tile_n,
                    int64_t lane) {
  uint32_t word = 0;
  for (int nibble = 0; nibble < 8; ++nibble) {
    const Place place = PlaceOf(lane, nibble);
    word |= from.Get(tile_k * kTile + place.row, tile_n * kTile + place.column) << (4 * nibble);
  }
  return word;
}

void ScatterWord(uint32_t word, int64_t tile_k, int64_t tile_n, int64_t lane,
                 const KPackedCodes<uint32_t>& to) {
  for (int nibble = 0; nibble < 8; ++nibble) {
    const Place place = PlaceOf(lane, nibble);
    to.Put(tile_k * kTile + place.row, tile_n * kTile + place.column, (word >> (4 * nibble)) & 15u);
  }
}

Status CheckTiledShape(int64_t k, int64_t n) {
  // Bounds the product of the padded sizes within int64.
  constexpr int64_t kPadding = 2 * kOriginalBlock;
  const bool valid = k >= 0 && n >= 0 &&
                     ((Checked(k) + Checked(kPadding)) * (Checked(n) + Checked(kPadding))).valid();
  if (valid) return {};
  return {Code::kInvalidArgument, "words: negative or overflowing shape [" + std::to_string(k) +
                                      ", " + std::to_string(n) + "]"};
}

Status CheckWordCount(const char* name, size_t got, int64_t expected, int64_t k, int64_t n) {
  if (got == static_cast<size_t>(expected)) return {};
  return {Code::kInvalidArgument,
          std::string(name) + ": expected " + std::to_string(expected) + " words, got " +
              std::to_string(got) + " (k=" + std::to_string(k) + ", n=" + std::to_string(n) + ")"};
}

Status CheckW4(int64_t k, int64_t n, size_t canonical, size_t tiles) {
  MARLIN_RETURN_IF_ERROR(CheckTiledShape(k, n));
  MARLIN_RETURN_IF_ERROR(CheckWordCount("canonical", canonical, CeilDivide(k, 8) * n, k, n));
  return CheckWordCount("tiles", tiles, MarlinW4WordCount(k, n), k, n);
}

/// Calls body(word index, tile_k, tile_n, lane) for every word of a marlin_w4 matrix.
template <typename Body>
void ForEachW4Word(int64_t k, int64_t n, Body body) {
  const int64_t n_blocks = CeilDivide(n, kW4Block);
  const int64_t blocks = CeilDivide(k, kW4Block) * n_blocks;
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t i = 0; i < kLanes * kWordsPerLane; ++i) {
      const int64_t word = i % kWordsPerLane;
      body(block * kLanes * kWordsPerLane + i, block / n_blocks * 2 + word / 2,
           block % n_blocks * 2 + word % 2, i / kWordsPerLane);
    }
  }
}

}  // namespace

int64_t MarlinW4WordCount(int64_t k, int64_t n) {
  const Checked blocks =
      CeilDiv(Checked(k), Checked(kW4Block)) * CeilDiv(Checked(n), Checked(kW4Block));
  return (blocks * Checked(kLanes * kWordsPerLane)).Take().value_or(INT64_MAX);
}

Status RepackToMarlinW4(int64_t k, int64_t n, std::span<const uint32_t> canonical,
                        std::span<uint32_t> tiles) {
  MARLIN_RETURN_IF_ERROR(CheckW4(k, n, canonical.size(), tiles.size()));
  const KPackedCodes from(k, n, canonical.data());
  ForEachW4Word(k, n, [&](int64_t index, int64_t tile_k, int64_t tile_n, int64_t lane) {
    tiles[static_cast<size_t>(index)] = GatherWord(from, tile_k, tile_n, lane);
  });
  return {};
}

Status RepackFromMarlinW4(int64_t k, int64_t n, std::span<const uint32_t> tiles,
                          std::span<uint32_t> canonical) {
  MARLIN_RETURN_IF_ERROR(CheckW4(k, n, canonical.size(), tiles.size()));
  std::fill(canonical.begin(), canonical.end(), 0u);
  const KPackedCodes to(k, n, canonical.data());
  ForEachW4Word(k, n, [&](int64_t index, int64_t tile_k, int64_t tile_n, int64_t lane) {
    ScatterWord(tiles[static_cast<size_t>(index)], tile_k, tile_n, lane, to);
  });
  return {};
}

Status RepackFromOriginalMarlin(int64_t k, int64_t n, std::span<const uint32_t> words,
                                std::span<uint32_t> canonical) {
  MARLIN_RETURN_IF_ERROR(CheckTiledShape(k, n));
  if (k % kTile != 0 || n % kOriginalBlock != 0) {
    return {Code::kInvalidArgument, "words: the layout needs k % 16 == 0 and n % 64 == 0, got k=" +
                                        std::to_string(k) + ", n=" + std::to_string(n)};
  }
  MARLIN_RETURN_IF_ERROR(CheckWordCount("words", words.size(), k / 8 * n, k, n));
  MARLIN_RETURN_IF_ERROR(CheckWordCount("canonical", canonical.size(), k / 8 * n, k, n));
  std::fill(canonical.begin(), canonical.end(), 0u);
  const KPackedCodes to(k, n, canonical.data());
  // A row of words is a row of tiles; a lane's four words are four adjacent tiles along n.
  const int64_t words_per_row = n * kTile / 8;
  for (size_t i = 0; i < words.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const int64_t in_row = index % words_per_row;
    const int64_t block = in_row / (kLanes * kWordsPerLane);
    ScatterWord(words[i], index / words_per_row, block * 4 + in_row % kWordsPerLane,
                in_row / kWordsPerLane % kLanes, to);
  }
  return {};
}

Status RepackFromVllmMarlin(int64_t k, int64_t n, std::span<const uint32_t> words,
                            std::span<uint32_t> canonical) {
  // vLLM kept the order of 4-bit words (for 16-bit activations) and changed the rest: zero points,
  // act-order, more shapes.
  return RepackFromOriginalMarlin(k, n, words, canonical);
}

}  // namespace marlin
