// Attention on matrix units: the part of a warp. 16 query rows (the rows of m16n8k16) and 16 keys
// at a time, with an online softmax over all of its keys (softmax_rows.cuh).
//
//     scores[16 rows, keys] = Q K^T         K: ldmatrix of [key][feature]
//     sums[16 rows, features] += P V        V: ldmatrix.trans of [key][feature]
//
//   Queries and softmax weights are split into two bf16 terms each, so that only fp32 sums round,
//   or rounded to one.
#pragma once

#include "backends/cuda/attention/exact/softmax_rows.cuh"
#include "backends/cuda/attention/pages.cuh"
#include "backends/cuda/attention/rows_layout.h"
#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/common/warp_matrix.cuh"
#include "backends/cuda/rows/typed.cuh"

namespace marlin::cuda {

/// A warp's operands in shared memory.
struct WarpOperands {
  uint32_t queries;  ///< [kWarpRows] rows of features: the rounded terms.
  uint32_t rests;    ///< The second terms, if there are two.
  int key_row;       ///< Bytes from row to row of queries and keys.
  int value_row;
};

/// The online softmax of 16 rows. kTiles: tiles of 16 value features, at most; `value_dim` may be
/// larger. kTerms: bf16 terms of queries and softmax weights.
template <int kTiles, int kTerms = 2>
class WarpSoftmax {
 public:
  MARLIN_DEVICE WarpSoftmax(const WarpOperands& operands, int key_dim, int value_dim, float scale,
                            float softcap = 0.0f)
      : operands_(operands),
        lane_(static_cast<int>(threadIdx.x) & 31),
        key_steps_(key_dim / 16),
        value_dim_(value_dim),
        scale_(scale * kLog2E),
        softcap_(softcap) {}

  /// Adds kWarpKeys keys in shared memory, the first of which is key `first`. visible(half) is the
  /// span of the keys that row lane / 4 + 8 * half sees.
  template <typename Visible>
  MARLIN_DEVICE void Add(uint32_t keys, uint32_t values, int first, const Visible& visible) {
    Scores scores = {};
    Score(keys, scores);
#pragma unroll
    for (float& score : scores) score *= scale_;
    CapScores(softcap_, scores);
    rows_.Mask(first, visible, scores);
    typename Rows::template Weights<kTerms> weights;
    rows_.Weigh(scores, weights);
    AddValues(values, weights[0]);
  }

  /// Adds the lanes' sums of weights. Call it once, at the end.
  MARLIN_DEVICE void SumLanes() { rows_.SumLanes(); }
  MARLIN_DEVICE float largest(int half) const { return rows_.largest(half); }
  MARLIN_DEVICE float sum(int half) const { return rows_.sum(half); }
  /// Calls run(feature, first value, second value) for adjacent features of a row.
  template <typename Run>
  MARLIN_DEVICE void ForPairs(int half, const Run& run) const {
    rows_.ForPairs(half, value_dim_, run);
  }

 private:
  using Rows = SoftmaxRows<kWarpKeys / 8, 2 * kTiles>;
  using Scores = typename Rows::Scores;
  using Weights = typename Rows::template WeightsOf16<kTerms>;

  MARLIN_DEVICE void Score(uint32_t keys, Scores& scores) const {
    const uint32_t place = (lane_ & 15) * operands_.key_row + (lane_ >> 4) * 16;
    const uint32_t query = operands_.queries + place;
    const uint32_t rest = operands_.rests + place;
    const uint32_t key =
        keys + ((lane_ & 7) + (lane_ >> 4) * 8) * operands_.key_row + (lane_ >> 3 & 1) * 16;
    float(&low)[4] = reinterpret_cast<float(&)[4]>(scores[0]);
    float(&high)[4] = reinterpret_cast<float(&)[4]>(scores[4]);
    StepOperands next;
    next.Load(query, rest, key);
    // A step's operands are loaded during the previous products.
#pragma unroll 4
    for (int step = 0; step < key_steps_; ++step) {
      const StepOperands now = next;
      const int to_next = (step + 1) * 32;
      if (step + 1 < key_steps_) next.Load(query + to_next, rest + to_next, key + to_next);
      MultiplyAdd<Bf16x2>(low, now.queries, now.keys[0], now.keys[1]);
      MultiplyAdd<Bf16x2>(high, now.queries, now.keys[2], now.keys[3]);
      if constexpr (kTerms == 2) {
        MultiplyAdd<Bf16x2>(low, now.rests, now.keys[0], now.keys[1]);
        MultiplyAdd<Bf16x2>(high, now.rests, now.keys[2], now.keys[3]);
      }
    }
  }

  /// The operands of 16 features.
  struct StepOperands {
    uint32_t queries[4];
    uint32_t rests[4];
    uint32_t keys[4];

    MARLIN_DEVICE void Load(uint32_t query, uint32_t rest, uint32_t key) {
      LoadMatrices(queries, query);
      if constexpr (kTerms == 2) LoadMatrices(rests, rest);
      LoadMatrices(keys, key);
    }
  };

  MARLIN_DEVICE void AddValues(uint32_t values, const Weights& weights) {
    // Without a branch after every tile, loads and products of several tiles overlap. With more
    // than 8 tiles, registers do not suffice for it.
    if constexpr (kTiles <= 8) {
      if (value_dim_ == kTiles * 16) return AddTiles<true>(values, weights);
    }
    AddTiles<false>(values, weights);
  }

  template <bool kAllTiles>
  MARLIN_DEVICE void AddTiles(uint32_t values, const Weights& weights) {
    const uint32_t value = values + (lane_ & 15) * operands_.value_row + (lane_ >> 4) * 16;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (!kAllTiles && n * 16 >= value_dim_) break;
      uint32_t v[4];
      LoadMatricesTransposed(v, value + n * 32);
      float(&low)[4] = reinterpret_cast<float(&)[4]>(rows_.values()[8 * n]);
      float(&high)[4] = reinterpret_cast<float(&)[4]>(rows_.values()[8 * n + 4]);
#pragma unroll
      for (const auto& term : weights.terms) {
        MultiplyAdd<Bf16x2>(low, term, v[0], v[1]);
        MultiplyAdd<Bf16x2>(high, term, v[2], v[3]);
      }
    }
  }

  WarpOperands operands_;
  int lane_;
  int key_steps_;
  int value_dim_;
  float scale_;  ///< Scale of scores in base 2.
  float softcap_;
  Rows rows_;
};

/// Loads a row of queries as two bf16 terms with one warp; zeros if the row does not exist.
MARLIN_DEVICE void LoadQueryRow(const RowsView& from, int64_t at, bool exists, int features,
                                uint8_t* rounded_row, uint8_t* rest_row) {
  const auto store = [&](int pair, float low, float high) {
    uint32_t rounded;
    uint32_t rest;
    SplitInTwo(low, high, &rounded, &rest);
    reinterpret_cast<uint32_t*>(rounded_row)[pair] = rounded;
    reinterpret_cast<uint32_t*>(rest_row)[pair] = rest;
  };
  const int lane = static_cast<int>(threadIdx.x) & 31;
  if (from.type == Element::kF32) {
    const float* const row = static_cast<const float*>(from.data) + at;
#pragma unroll 2
    for (int pair = lane; pair < features / 2; pair += 32) {
      const float low = exists ? row[2 * pair] : 0.0f;
      store(pair, low, exists ? row[2 * pair + 1] : 0.0f);
    }
    return;
  }
#pragma unroll 1
  for (int pair = lane; pair < features / 2; pair += 32) {
    const float low = exists ? LoadFloat(from.data, from.type, at + 2 * pair) : 0.0f;
    store(pair, low, exists ? LoadFloat(from.data, from.type, at + 2 * pair + 1) : 0.0f);
  }
}

}  // namespace marlin::cuda
