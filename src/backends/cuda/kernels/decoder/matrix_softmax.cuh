// Attention on matrix units: the part of a warp. 16 query rows (the rows of m16n8k16) and one to
// four groups of 16 keys at a time, with an online softmax over all of its keys. More groups share
// one load of the queries and one update of the softmax, and their chains of MMAs run side by side.
//
//     scores[16 rows, keys] = Q K^T         K: ldmatrix of [key][feature]
//     sums[16 rows, features] += P V        V: ldmatrix.trans of [key][feature]
//
//   Queries and softmax weights are split into two bf16 terms each, so that only fp32 sums round.
#pragma once

#include "backends/cuda/kernels/common/async_copy.cuh"
#include "backends/cuda/kernels/common/epilogue.cuh"
#include "backends/cuda/kernels/common/warp_matrix.cuh"
#include "backends/cuda/kernels/decoder/pages.cuh"
#include "backends/cuda/kernels/decoder/typed.cuh"

namespace marlin::cuda {

inline constexpr int kWarpKeys = 16;
inline constexpr int kWarpRows = 16;
/// Rows in shared memory are an odd number of 16-byte units apart: no bank conflicts in ldmatrix.
inline constexpr int kRowPadding = 16;
inline constexpr float kLog2E = 1.44269504088896340736f;

MARLIN_DEVICE float NoScore() { return -INFINITY; }

/// 2^x in one instruction, with a relative error of 2^-22.
MARLIN_DEVICE float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 2^(from - to), 0 for a part without keys.
MARLIN_DEVICE float RescaleFactor(float from, float to) {
  return from == NoScore() ? 0.0f : Exp2(from - to);
}

/// Two floats as bf16 pairs: the rounded values, and what rounding left.
MARLIN_DEVICE void SplitInTwo(float low, float high, uint32_t* rounded, uint32_t* rest) {
  *rounded = Bf16x2::Pack(low, high);
  const float2 values = Bf16x2::Unpack(*rounded);
  *rest = Bf16x2::Pack(low - values.x, high - values.y);
}

MARLIN_HOST_DEVICE constexpr int SharedRowBytes(int features) { return features * 2 + kRowPadding; }

/// Rows of keys and values in shared memory.
struct CachedRows {
  int key_row;  ///< Bytes from row to row of what is multiplied ...
  int value_row;
  int copied_key_row;  ///< ... and of what is copied, which is the same for bf16.
  int copied_value_row;
  bool widens;

  MARLIN_HOST_DEVICE CachedRows(int key_dim, int value_dim, bool fp8)
      : key_row(SharedRowBytes(key_dim)),
        value_row(SharedRowBytes(value_dim)),
        copied_key_row(fp8 ? key_dim : key_row),
        copied_value_row(fp8 ? value_dim : value_row),
        widens(fp8) {}
};

/// Keys [first, end) are visible.
struct KeySpan {
  int first;
  int end;
};

/// Where a warp's operands lie in shared memory.
struct WarpOperands {
  uint32_t queries;  ///< [kWarpRows] rows of features: the rounded terms.
  uint32_t rests;    ///< The second terms.
  int key_row;       ///< Bytes from row to row of queries and keys.
  int value_row;
};

/// The online softmax of 16 rows. kTiles: tiles of 16 value features, at most. kGroups: groups of
/// 16 keys that are added at a time.
template <int kTiles, int kGroups = 1>
class WarpSoftmax {
 public:
  static constexpr int kKeys = kGroups * kWarpKeys;

  MARLIN_DEVICE WarpSoftmax(const WarpOperands& operands, int key_dim, int value_dim, float scale)
      : operands_(operands),
        lane_(static_cast<int>(threadIdx.x) & 31),
        key_steps_(key_dim / 16),
        value_dim_(value_dim),
        scale_(scale * kLog2E) {}

  /// Adds kKeys keys in shared memory, the first of which is key `first`. visible(half) is the span
  /// of the keys that row lane / 4 + 8 * half sees. `masked`: some row does not see all of them.
  /// `by_key`: with values that are not finite, of keys that not all rows see.
  template <typename Visible>
  MARLIN_DEVICE void Add(uint32_t keys, uint32_t values, int first, bool masked,
                         const Visible& visible, bool by_key = false) {
    Scores scores = {};
    Score(keys, scores);
#pragma unroll
    for (int tile = 0; tile < kScoreTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[tile][i] *= scale_;
    }
    if (masked) Mask(first, visible, scores);
    uint32_t weights[kGroups][4];
    uint32_t rests[kGroups][4];
    Weigh(scores, weights, rests);
    if (by_key) {
      AddByKey(values, scores);
    } else {
      AddValues(values, weights, rests);
    }
  }

  /// Adds the lanes' sums of weights. Call it once, at the end.
  MARLIN_DEVICE void SumLanes() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum_[half] += __shfl_xor_sync(~0u, sum_[half], 1);
      sum_[half] += __shfl_xor_sync(~0u, sum_[half], 2);
    }
  }

  MARLIN_DEVICE float largest(int half) const { return largest_[half]; }
  MARLIN_DEVICE float sum(int half) const { return sum_[half]; }
  /// Calls run(feature, first value, second value) for adjacent features of a row.
  template <typename Run>
  MARLIN_DEVICE void ForPairs(int half, const Run& run) const {
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
      if (n * 8 >= value_dim_) break;
      run(n * 8 + (lane_ & 3) * 2, values_[n][2 * half], values_[n][2 * half + 1]);
    }
  }

 private:
  static constexpr int kScoreTiles = 2 * kGroups;  ///< Eight keys each.
  using Scores = float[kScoreTiles][4];

  /// Takes away the scores of keys that a row does not see.
  template <typename Visible>
  MARLIN_DEVICE void Mask(int first, const Visible& visible, Scores& scores) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeySpan span = visible(half);
#pragma unroll
      for (int i = 0; i < 2 * kScoreTiles; ++i) {
        const int key = first + (i >> 1) * 8 + (lane_ & 3) * 2 + (i & 1);
        if (key < span.first || key >= span.end) scores[i >> 1][2 * half + (i & 1)] = NoScore();
      }
    }
  }

  MARLIN_DEVICE void Score(uint32_t keys, Scores& scores) const {
    const uint32_t place = (lane_ & 15) * operands_.key_row + (lane_ >> 4) * 16;
    const uint32_t query = operands_.queries + place;
    const uint32_t rest = operands_.rests + place;
    const uint32_t key =
        keys + ((lane_ & 7) + (lane_ >> 4) * 8) * operands_.key_row + (lane_ >> 3 & 1) * 16;
#pragma unroll(kGroups == 1 ? 4 : 2)
    for (int step = 0; step < key_steps_; ++step) {
      uint32_t a[4];
      uint32_t b[4];
      uint32_t k[kGroups][4];
      LoadMatrices(a, query + step * 32);
      LoadMatrices(b, rest + step * 32);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        LoadMatrices(k[group], key + group * kWarpKeys * operands_.key_row + step * 32);
      }
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        MultiplyAdd<Bf16x2>(scores[2 * group], a, k[group][0], k[group][1]);
        MultiplyAdd<Bf16x2>(scores[2 * group + 1], a, k[group][2], k[group][3]);
      }
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        MultiplyAdd<Bf16x2>(scores[2 * group], b, k[group][0], k[group][1]);
        MultiplyAdd<Bf16x2>(scores[2 * group + 1], b, k[group][2], k[group][3]);
      }
    }
  }

  /// The softmax weights of scores in base 2, as MMA operands in two terms; rescales the sums.
  MARLIN_DEVICE void Weigh(const Scores& scores, uint32_t (&weights)[kGroups][4],
                           uint32_t (&rests)[kGroups][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = NoScore();
#pragma unroll
      for (int tile = 0; tile < kScoreTiles; ++tile) {
        most = fmaxf(most, fmaxf(scores[tile][2 * half], scores[tile][2 * half + 1]));
      }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      most = fmaxf(most, largest_[half]);
      if (__any_sync(~0u, most != largest_[half])) {
        const float factor = RescaleFactor(largest_[half], most);
        largest_[half] = most;
        sum_[half] *= factor;
#pragma unroll
        for (int n = 0; n < 2 * kTiles; ++n) {
          values_[n][2 * half] *= factor;
          values_[n][2 * half + 1] *= factor;
        }
      }
#pragma unroll
      for (int tile = 0; tile < kScoreTiles; ++tile) {
        // A masked key is compared, not subtracted: -Inf - -Inf is NaN.
        const auto weight = [&](float score) {
          return score == NoScore() ? 0.0f : Exp2(score - most);
        };
        const float low = weight(scores[tile][2 * half]);
        const float high = weight(scores[tile][2 * half + 1]);
        sum_[half] += low + high;
        const int at = 2 * (tile & 1) + half;
        SplitInTwo(low, high, &weights[tile >> 1][at], &rests[tile >> 1][at]);
      }
    }
  }

  MARLIN_DEVICE void AddValues(uint32_t values, const uint32_t (&weights)[kGroups][4],
                               const uint32_t (&rests)[kGroups][4]) {
    // Without a branch after every tile, loads and products of several tiles overlap. With more
    // than 8 tiles, registers do not suffice for it.
    if constexpr (kTiles <= 8) {
      if (value_dim_ == kTiles * 16) return AddTiles<true>(values, weights, rests);
    }
    AddTiles<false>(values, weights, rests);
  }

  template <bool kAllTiles>
  MARLIN_DEVICE void AddTiles(uint32_t values, const uint32_t (&weights)[kGroups][4],
                              const uint32_t (&rests)[kGroups][4]) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const uint32_t value =
          values + (group * kWarpKeys + (lane_ & 15)) * operands_.value_row + (lane_ >> 4) * 16;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (!kAllTiles && n * 16 >= value_dim_) break;
        uint32_t v[4];
        LoadMatricesTransposed(v, value + n * 32);
        MultiplyAdd<Bf16x2>(values_[2 * n], weights[group], v[0], v[1]);
        MultiplyAdd<Bf16x2>(values_[2 * n + 1], weights[group], v[2], v[3]);
        MultiplyAdd<Bf16x2>(values_[2 * n], rests[group], v[0], v[1]);
        MultiplyAdd<Bf16x2>(values_[2 * n + 1], rests[group], v[2], v[3]);
      }
    }
  }

  /// AddValues in fp32, without the products of keys that a row does not see.
  MARLIN_DEVICE void AddByKey(uint32_t values, const Scores& scores) {
    // Registers have no index, so the loop over tiles is unrolled.
#pragma unroll
    for (int tile = 0; tile < kScoreTiles; ++tile) {
#pragma unroll 1
      for (int key = 0; key < 8; ++key) AddKey(values, tile * 8 + key, scores[tile]);
    }
  }

  /// Adds one key; `scores` are those of its tile.
  MARLIN_DEVICE void AddKey(uint32_t values, int key, const float (&scores)[4]) {
    // The lane of this lane's rows that has the key's scores.
    const int owner = (lane_ & ~3) | (key & 7) >> 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float even = __shfl_sync(~0u, scores[2 * half], owner);
      const float odd = __shfl_sync(~0u, scores[2 * half + 1], owner);
      const float score = (key & 1) != 0 ? odd : even;
      if (score == NoScore()) continue;
      const float weight = Exp2(score - largest_[half]);
#pragma unroll
      for (int n = 0; n < 2 * kTiles; ++n) {
        if (n * 8 >= value_dim_) break;
        const float2 pair = Bf16x2::Unpack(
            LoadShared4(values + key * operands_.value_row + (n * 8 + (lane_ & 3) * 2) * 2));
        values_[n][2 * half] = __fmaf_rn(weight, pair.x, values_[n][2 * half]);
        values_[n][2 * half + 1] = __fmaf_rn(weight, pair.y, values_[n][2 * half + 1]);
      }
    }
  }

  WarpOperands operands_;
  int lane_;
  int key_steps_;
  int value_dim_;
  float scale_;                                ///< Scale of scores in base 2.
  float largest_[2] = {NoScore(), NoScore()};  ///< Rows lane / 4 and lane / 4 + 8.
  float sum_[2] = {0.0f, 0.0f};
  float values_[2 * kTiles][4] = {};
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

/// The division by a row's sum of weights, to which a sink adds. `largest` is in base 2.
struct SoftmaxFinish {
  float factor = 1.0f;
  float sum;

  MARLIN_DEVICE SoftmaxFinish(const AttentionArguments& args, int head, float largest, float total)
      : sum(total) {
    if (args.sinks == nullptr) return;
    const float sink = args.sinks[head] * kLog2E;
    const float together = fmaxf(largest, sink);
    factor = RescaleFactor(largest, together);
    sum = __fmaf_rn(total, factor, RescaleFactor(sink, together));
  }
  MARLIN_DEVICE float Of(float value) const { return __fdiv_rn(value * factor, sum); }
};

}  // namespace marlin::cuda
