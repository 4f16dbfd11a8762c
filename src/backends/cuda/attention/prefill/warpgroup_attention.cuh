// Attention on asynchronous products (wgmma): the part of a warpgroup. It has 64 query rows, and
// adds a block of keys at a time to their online softmax (softmax_rows.cuh).
//
//     scores[64 rows, keys] = Q K^T         Q, K: panels of [row or key][64 features]
//     sums[64 rows, features] += P V        V: panels of [key][64 features]; P in registers
//
//   Queries and softmax weights are split into two bf16 terms each, so that only fp32 sums round,
//   or rounded to one, where that is allowed.
#pragma once

#include "backends/cuda/attention/exact/softmax_rows.cuh"
#include "backends/cuda/common/warpgroup_products.cuh"
#include "backends/cuda/common/wgmma_instructions.cuh"
#include "backends/cuda/decoder/decoder_layout.h"

namespace marlin::cuda {

inline constexpr int kPanelFeatures = 64;
inline constexpr int kPanelRowBytes = 2 * kPanelFeatures;

MARLIN_HOST_DEVICE constexpr int PanelsOf(int features) {
  return (features + kPanelFeatures - 1) / kPanelFeatures;
}

/// Bytes before 16-byte unit `unit` of a row, in panels of `rows` rows in the 128-byte swizzle.
MARLIN_DEVICE uint32_t PlaceInPanels(int rows, int row, int unit) {
  return (unit >> 3) * rows * kPanelRowBytes + row * kPanelRowBytes + (((unit ^ row) & 7) << 4);
}

/// Whether a value is true in some thread of a warpgroup; all of its threads call it.
MARLIN_DEVICE bool AnyOfWarpgroup(int warpgroup, bool value) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.b32 p, %1, 0;\n"
      "bar.red.or.pred q, %2, 128, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}\n"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(value)), "r"(1 + warpgroup)
      : "memory");
  return any != 0;
}

/// The queries of a warpgroup in shared memory: 64 rows in each panel, scaled for scores in base 2.
struct WarpgroupQueries {
  uint32_t rounded;
  uint32_t rests;   ///< The second terms, if there are two.
  int panel_bytes;  ///< From panel to panel.
};

/// kKeys: keys of a block. kFeatures: value features, at most. kTerms: bf16 terms of queries and
/// softmax weights.
template <int kKeys, int kFeatures, int kTerms>
class WarpgroupAttention {
 public:
  using Rows = SoftmaxRows<kKeys / 8, kFeatures / 8>;
  using Scores = typename Rows::Scores;
  using Weights = typename Rows::template Weights<kTerms>;

  MARLIN_DEVICE WarpgroupAttention(const WarpgroupQueries& queries, int key_dim, int value_dim)
      : queries_(queries), key_steps_(key_dim / 16), value_dim_(value_dim) {}

  MARLIN_DEVICE Rows& rows() { return rows_; }

  /// Begins the scores of a block of keys at `keys` in shared memory.
  MARLIN_DEVICE void BeginScores(uint32_t keys, Scores& scores) const {
    PinSums(scores);
    FenceProducts();
    // Products of an unrolled loop follow each other without a wait.
    if (key_steps_ == 8) {
      ScoreSteps<8>(keys, scores);
    } else if (key_steps_ == 12) {
      ScoreSteps<12>(keys, scores);
    } else if (key_steps_ == 4) {
      ScoreSteps<4>(keys, scores);
    } else {
#pragma unroll 1
      for (int step = 0; step < key_steps_; ++step) ScoreStep(keys, step, scores);
    }
    CommitProducts();
  }
  /// Waits for everything that was begun.
  MARLIN_DEVICE void EndProducts(Scores& scores) {
    WaitForProducts<0>();
    PinSums(scores);
    PinSums(rows_.values());
  }

  /// Begins to add the values of a block, with the weights of its scores.
  MARLIN_DEVICE void BeginValues(uint32_t values, const Weights& weights) {
    auto& sums = rows_.values();
    PinSums(sums);
    FenceProducts();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      constexpr uint32_t kPanelStep = uint32_t{kBlockPanelBytes >> 4} << 16;
      const uint64_t of_step =
          Descriptor(((values + step * 16 * kPanelRowBytes) >> 4) | kPanelStep);
#pragma unroll
      for (const auto& term : weights[step].terms) {
        ValueProduct<kFeatures>::Run(sums, term, of_step, 1);
      }
    }
    CommitProducts();
  }

  /// Adds the values of a block, but none of keys that a row does not see.
  MARLIN_DEVICE void AddByKey(uint32_t values, const Scores& scores) {
    Weights weights;
    rows_.Weigh(scores, weights);
#pragma unroll 1
    for (int key = 0; key < kKeys; ++key) {
      rows_.AddKey(key, scores, value_dim_, [&](int feature) {
        return LoadShared4(values + PlaceInPanels(kKeys, key, feature >> 3) + (feature & 7) * 2);
      });
    }
  }

  /// Whether all values of a block are finite; called by all threads of the warpgroup.
  MARLIN_DEVICE bool AreFinite(int warpgroup, uint32_t values) const {
    const int thread = static_cast<int>(threadIdx.x) & 127;
    const int key = thread % kKeys;
    bool finite = true;
#pragma unroll 4
    for (int unit = thread / kKeys; unit < value_dim_ / 8; unit += 128 / kKeys) {
      const uint4 pairs = LoadShared16(values + PlaceInPanels(kKeys, key, unit));
      finite = AndFinite(finite, pairs);
    }
    return !AnyOfWarpgroup(warpgroup, !finite);
  }

 private:
  static constexpr int kBlockPanelBytes = kKeys * kPanelRowBytes;

  template <int kSteps>
  MARLIN_DEVICE void ScoreSteps(uint32_t keys, Scores& scores) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) ScoreStep(keys, step, scores);
  }

  /// Adds the products of 16 features; the products of the first 16 replace the scores.
  MARLIN_DEVICE void ScoreStep(uint32_t keys, int step, Scores& scores) const {
    // 16 features are 32 bytes of a row, in addresses of 16 bytes.
    const uint32_t in_panel = (step & 3) * 2;
    const uint32_t query = in_panel + (step >> 2) * (queries_.panel_bytes >> 4);
    const uint32_t key = in_panel + (step >> 2) * (kBlockPanelBytes >> 4);
    const uint64_t of_step = Descriptor((keys >> 4) + key);
    ScoreProduct<kKeys>::Run(scores, Descriptor((queries_.rounded >> 4) + query), of_step,
                             step > 0);
    if constexpr (kTerms == 2) {
      ScoreProduct<kKeys>::Run(scores, Descriptor((queries_.rests >> 4) + query), of_step, 1);
    }
  }

  WarpgroupQueries queries_;
  int key_steps_;
  int value_dim_;
  Rows rows_;
};

}  // namespace marlin::cuda
