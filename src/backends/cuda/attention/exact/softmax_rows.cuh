// The online softmax of attention on matrix units, as far as registers go: scores and sums as the
// accumulators of m16n8 and m64n8 products, of which a lane has rows lane / 4 and lane / 4 + 8 of
// its warp's 16.
#pragma once

#include "backends/cuda/attention/attention_layout.h"
#include "backends/cuda/common/fragment_math.cuh"

namespace marlin::cuda {

inline constexpr int kWarpRows = 16;
inline constexpr float kLog2E = 1.44269504088896340736f;

MARLIN_DEVICE float NoScore() { return -INFINITY; }

/// 2^x in one instruction, with a relative error of 2^-22.
MARLIN_DEVICE float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / x in one instruction, with a relative error of 2^-23; 0 for infinity.
MARLIN_DEVICE float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Caps scores in base 2, as AttentionOptions::softcap: tanh(x) is 1 - 2 / (1 + e^2x), to 2^-22 of
/// the cap.
template <int kCount>
MARLIN_DEVICE void CapScores(float softcap, float (&scores)[kCount]) {
  if (softcap == 0.0f) return;
  const float cap = softcap * kLog2E;
  const float rate = 2.0f * Reciprocal(softcap);
#pragma unroll
  for (float& score : scores) {
    score = __fmaf_rn(-2.0f * cap, Reciprocal(1.0f + Exp2(rate * score)), cap);
  }
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

/// Whether `before` holds and eight bf16 numbers are finite.
MARLIN_DEVICE bool AndFinite(bool before, const uint4& pairs) {
  bool finite = before;
  for (const uint32_t pair : {pairs.x, pairs.y, pairs.z, pairs.w}) {
    finite = finite && (pair & 0x7f80u) != 0x7f80u && (pair & 0x7f800000u) != 0x7f800000u;
  }
  return finite;
}

/// kScoreTiles: groups of eight keys that are added at a time. kValueTiles: groups of eight value
/// features, at most.
template <int kScoreTiles, int kValueTiles>
class SoftmaxRows {
 public:
  /// Scores of kScoreTiles groups, four of a lane each.
  using Scores = float[4 * kScoreTiles];
  /// The weights of 16 keys as the A operand of a product, in one bf16 term or two.
  template <int kTerms>
  struct WeightsOf16 {
    uint32_t terms[kTerms][4];
  };
  template <int kTerms>
  using Weights = WeightsOf16<kTerms>[kScoreTiles / 2];

  MARLIN_DEVICE SoftmaxRows() : lane_(static_cast<int>(threadIdx.x) & 31) {}

  /// Takes away the scores of keys that a row does not see: visible(half) is the span of row
  /// lane / 4 + 8 * half, `first` the first key.
  template <typename Visible>
  MARLIN_DEVICE void Mask(int first, const Visible& visible, Scores& scores) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeySpan span = visible(half);
#pragma unroll
      for (int i = 0; i < 2 * kScoreTiles; ++i) {
        const int key = first + (i >> 1) * 8 + (lane_ & 3) * 2 + (i & 1);
        if (key < span.first || key >= span.end) scores[Index(i >> 1, half, i & 1)] = NoScore();
      }
    }
  }

  /// The softmax weights of scores in base 2; rescales the sums.
  template <int kTerms>
  MARLIN_DEVICE void Weigh(const Scores& scores, Weights<kTerms>& weights) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Raise(half, LargestOf(scores, half));
      // Without a key so far: -Inf - -Inf is NaN.
      const float most = largest_[half] == NoScore() ? 0.0f : largest_[half];
#pragma unroll
      for (int tile = 0; tile < kScoreTiles; ++tile) {
        const float low = Exp2(scores[Index(tile, half, 0)] - most);
        const float high = Exp2(scores[Index(tile, half, 1)] - most);
        sum_[half] += low + high;
        auto& terms = weights[tile >> 1].terms;
        const int at = 2 * (tile & 1) + half;
        if constexpr (kTerms == 1) {
          terms[0][at] = Bf16x2::Pack(low, high);
        } else {
          SplitInTwo(low, high, &terms[0][at], &terms[1][at]);
        }
      }
    }
  }

  /// Adds one key in fp32, but not to rows that do not see it. load(feature) is the pair of its
  /// values from there on.
  template <typename Load>
  MARLIN_DEVICE void AddKey(int key, const Scores& scores, int value_dim, const Load& load) {
    // The lane of this lane's rows that has the key's scores.
    const int owner = (lane_ & ~3) | (key & 7) >> 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float mine = NoScore();
      // Registers have no index.
#pragma unroll
      for (int tile = 0; tile < kScoreTiles; ++tile) {
        const float of_tile = scores[Index(tile, half, 0)];
        const float odd = scores[Index(tile, half, 1)];
        if (key >> 3 == tile) mine = (key & 1) != 0 ? odd : of_tile;
      }
      const float score = __shfl_sync(~0u, mine, owner);
      if (score == NoScore()) continue;
      const float weight = Exp2(score - largest_[half]);
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) {
        if (n * 8 >= value_dim) break;
        const float2 pair = Bf16x2::Unpack(load(n * 8 + (lane_ & 3) * 2));
        values_[Index(n, half, 0)] = __fmaf_rn(weight, pair.x, values_[Index(n, half, 0)]);
        values_[Index(n, half, 1)] = __fmaf_rn(weight, pair.y, values_[Index(n, half, 1)]);
      }
    }
  }

  /// Adds the lanes' sums of weights. Call it once, at the end.
  MARLIN_DEVICE void SumLanes() {
#pragma unroll
    for (float& sum : sum_) {
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
    }
  }

  MARLIN_DEVICE float largest(int half) const { return largest_[half]; }
  MARLIN_DEVICE float sum(int half) const { return sum_[half]; }
  /// The accumulators of the values.
  MARLIN_DEVICE float (&values())[4 * kValueTiles] { return values_; }
  /// Calls run(feature, first value, second value) for adjacent features of a row.
  template <typename Run>
  MARLIN_DEVICE void ForPairs(int half, int value_dim, const Run& run) const {
    if (value_dim == 8 * kValueTiles) {
      // Without a branch after every pair.
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) RunPair(n, half, run);
      return;
    }
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      if (n * 8 < value_dim) RunPair(n, half, run);
    }
  }

 private:
  template <typename Run>
  MARLIN_DEVICE void RunPair(int n, int half, const Run& run) const {
    run(n * 8 + (lane_ & 3) * 2, values_[Index(n, half, 0)], values_[Index(n, half, 1)]);
  }

  static MARLIN_DEVICE constexpr int Index(int tile, int half, int i) {
    return 4 * tile + 2 * half + i;
  }

  static MARLIN_DEVICE float LargestOf(const Scores& scores, int half) {
    float most = NoScore();
#pragma unroll
    for (int tile = 0; tile < kScoreTiles; ++tile) {
      most = fmaxf(most, fmaxf(scores[Index(tile, half, 0)], scores[Index(tile, half, 1)]));
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    return fmaxf(most, __shfl_xor_sync(~0u, most, 2));
  }

  /// Raises the largest score of a row; called by all lanes.
  MARLIN_DEVICE void Raise(int half, float most) {
    most = fmaxf(most, largest_[half]);
    if (__all_sync(~0u, most == largest_[half])) return;
    const float factor = RescaleFactor(largest_[half], most);
    largest_[half] = most;
    sum_[half] *= factor;
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      values_[Index(n, half, 0)] *= factor;
      values_[Index(n, half, 1)] *= factor;
    }
  }

  int lane_;
  float largest_[2] = {NoScore(), NoScore()};  ///< Rows lane / 4 and lane / 4 + 8.
  float sum_[2] = {0.0f, 0.0f};
  float values_[4 * kValueTiles] = {};
};

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
