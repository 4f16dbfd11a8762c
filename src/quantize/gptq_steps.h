// Products inside a block of weights, for all columns of a tile at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "quantize/gptq_tile.h"

namespace marlin {

/// sums[c] += sum over j < count of factors[j] * rows[j][c], with rows [count][kGptqColumns].
void AddCombination(const float* factors, const float* rows, int64_t count, GptqLanes& sums);

/// The products of a block's weights, kept up to date while the errors of these weights change.
class GptqTile::Steps {
 public:
  /// `columns`: the tile's columns.
  Steps(const GptqBlock& block, int64_t columns)
      : block_(block),
        products_(static_cast<size_t>(block.count() * kGptqColumns)),
        changes_(products_.size()) {
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t i = 0; i < block.count(); ++i) {
        products_[static_cast<size_t>(i * kGptqColumns + c)] =
            block.products[c * block.count() + i];
      }
    }
  }

  /// The products of weight i, where the errors of the first `changed` weights have changed.
  void Take(int64_t i, int64_t changed, GptqLanes& sums) const {
    std::copy_n(products_.data() + i * kGptqColumns, kGptqColumns, sums);
    AddCombination(block_.Factors(i), changes_.data(), changed, sums);
  }

  /// Notes how the errors of weight i change.
  void Change(int64_t i, const float* before, const float* after) {
    float* const change = changes_.data() + i * kGptqColumns;
    for (int64_t c = 0; c < kGptqColumns; ++c) change[c] = after[c] - before[c];
  }

 private:
  const GptqBlock& block_;
  std::vector<float> products_;  ///< [weights of the block][kGptqColumns]
  std::vector<float> changes_;   ///< The same.
};

}  // namespace marlin
