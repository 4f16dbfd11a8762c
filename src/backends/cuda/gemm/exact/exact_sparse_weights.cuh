// 2:4 weights for the exact kernel: a lane expands the codes of a unit in registers, to the words
// that it would load from dense tiles. All else is TileWeights.
#pragma once

#include "backends/cuda/gemm/exact/exact_weights.cuh"
#include "backends/cuda/layout/sparse_layout.h"
#include "backends/cuda/weights/expand_sparse.cuh"

namespace marlin::cuda {

/// Weights in sparse tiles.
template <CodeKind kKind>
class SparseTileWeights : public TileWeights<kKind, kSparseTileBytes> {
  using Dense = TileWeights<kKind, kSparseTileBytes>;

 public:
  using View = SparseTileView;
  using typename Dense::Raw;
  static_assert(CodeBits(kKind) == kSparseBits && Dense::kLoadSteps == kExactSteps);

  MARLIN_DEVICE SparseTileWeights(const View& view, int column, int lane)
      : Dense(view, column, lane), sparse_(view) {}

  MARLIN_DEVICE void Load(int unit, int step, Raw& raw) const {
    const uint8_t* const tile = this->TileOf(unit);
    const int half = unit & 1;
    const int t = this->lane() & 3;
    const int first = this->lane() - t;
    // Computed anew for every unit: a register less where the sums need them all.
    const uint32_t zeros = PairOf<kKind>(sparse_.zero_code);
    const auto selector = [](uint32_t offset) -> uint32_t {
      return SelectorOf(static_cast<int>(offset / 2));
    };
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const uint8_t* const block = tile + b * BlockBytes(kSparseBits);
      const uint2 low = WordsOf(block, first + t / 2, half);
      const uint2 high = WordsOf(block, first + t / 2 + 2, half);
      const uint2 even = WordsOf(tile + kMetadataOffset, first + 2 * b, half);
      const uint2 odd = WordsOf(tile + kMetadataOffset, first + 2 * b + 1, half);
      const uint32_t kept[2][2] = {{low.x, high.x}, {low.y, high.y}};
      const uint32_t metadata[2][2] = {{even.x, odd.x}, {even.y, odd.y}};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t words[2];
        ExpandStep<kKind>(kept[j], metadata[j], t, zeros, selector, words);
        raw.words[b][2 * j] = words[0];
        raw.words[b][2 * j + 1] = words[1];
      }
    }
    this->LoadParameters(unit, step, raw);
  }

 private:
  /// The words of a half of 64 k, two of a lane's four.
  static MARLIN_DEVICE uint2 WordsOf(const uint8_t* words, int lane, int half) {
    return __ldg(reinterpret_cast<const uint2*>(words) + lane * 2 + half);
  }

  const View& sparse_;
};

}  // namespace marlin::cuda
