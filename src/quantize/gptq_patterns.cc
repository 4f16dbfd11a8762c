// Steps for 2:4 sparsity: which weights a tile keeps, and the codes of its blocks of four.
#include <algorithm>

#include "base/checked.h"
#include "layout/packing.h"
#include "layout/sparse_24.h"
#include "quantize/gptq_steps.h"
#include "quantize/sparse_block.h"

namespace marlin {

std::vector<uint8_t> ChooseKept(std::span<const float> weights, std::span<const float> importance) {
  std::vector<uint8_t> kept(weights.size());
  const auto all = static_cast<int64_t>(importance.size());
  for (int64_t k = 0; k < all; ++k) {
    const int64_t first = k / kSparseBlock * kSparseBlock;
    const int64_t end = std::min(first + kSparseBlock, all);
    for (int64_t c = 0; c < kGptqColumns; ++c) {
      const auto rank = [&](int64_t i) {
        const float w = weights[static_cast<size_t>(i * kGptqColumns + c)];
        return importance[static_cast<size_t>(i)] * w * w;
      };
      int larger = 0;
      for (int64_t i = first; i < end; ++i) {
        larger += rank(i) > rank(k) || (rank(i) == rank(k) && i < k) ? 1 : 0;
      }
      kept[static_cast<size_t>(k * kGptqColumns + c)] = larger < 2 ? 1 : 0;
    }
  }
  return kept;
}

/// Sets the codes of a block of three or four weights to its best pattern.
void GptqTile::DescendPattern(const GptqBlock& block, int64_t position, int64_t count,
                              Steps& steps) {
  const int64_t first = block.weights[static_cast<size_t>(position)];
  float h[kSparseBlock][kSparseBlock];
  GptqLanes pull[kSparseBlock];  // The gradient of the errors outside the block.
  for (int64_t i = 0; i < count; ++i) {
    steps.Take(position + i, position, pull[i]);
    for (int64_t j = 0; j < count; ++j) {
      h[i][j] = block.Factors(position + i)[position + j];
      const float* const errors = Row(errors_, first + j);
      for (int64_t c = 0; c < kGptqColumns; ++c) pull[i][c] -= h[i][j] * errors[c];
    }
  }
  const int64_t padded = RoundUp(k_, kPackRun);
  const GroupParameters* const parameters = &Parameters(first, 0);
  SparseBlock best(count, h, pull);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t c = 0; c < columns_; ++c) {
      best.codes[i][c] = codes_[static_cast<size_t>(c * padded + first + i)];
    }
    std::copy_n(Row(errors_, first + i), kGptqColumns, best.errors[i]);
  }
  best.Measure();
  best.TakeBestPattern(problem_.encoder, parameters, Row(weights_, first));
  for (int64_t i = 0; i < count; ++i) {
    steps.Change(position + i, Row(errors_, first + i), best.errors[i]);
    std::copy_n(best.errors[i], kGptqColumns, Row(errors_, first + i));
    for (int64_t c = 0; c < columns_; ++c) {
      codes_[static_cast<size_t>(c * padded + first + i)] = best.codes[i][c];
    }
  }
}

void GptqTile::DescendPatterns(const GptqBlock& block) {
  Steps steps(block, columns_);
  for (int64_t i = 0; i < block.count();) {
    const int64_t k = block.weights[static_cast<size_t>(i)];
    const int64_t count = std::min(kSparseBlock, k_ - k / kSparseBlock * kSparseBlock);
    if (count <= 2) {
      DescendRow(block, i++, steps);  // Both weights are kept.
    } else {
      DescendPattern(block, i, count, steps);
      i += count;
    }
  }
  StoreErrors(block);
}

}  // namespace marlin
