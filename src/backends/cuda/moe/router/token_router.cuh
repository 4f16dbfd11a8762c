// MoE routing of one token by a warp or by all threads of a CTA: top-k expert selection from
// logits. Scores are in double, as in the CPU's router (backends/cpu/decoder/cpu_router.cc), so
// that rounding does not decide the selection.
#pragma once

#include <cfloat>
#include <cmath>

#include "backends/cuda/common/fragment_math.cuh"
#include "backends/cuda/common/thread_barrier.cuh"
#include "backends/cuda/moe/router/router_launch.h"

namespace marlin::cuda {

inline constexpr int kSoftmaxOfChosen = 1;
inline constexpr int kSigmoid = 2;
inline constexpr unsigned kAll = 0xffffffffU;

MARLIN_DEVICE double Never() { return -INFINITY; }

/// The threads that route one token: a warp, or the first warps of a CTA.
template <int kWarps>
struct Team {
  static constexpr int kThreads = kWarps * 32;
  double* exchange;  ///< Shared memory, one for every warp of a CTA.

  static MARLIN_DEVICE int Rank() { return static_cast<int>(threadIdx.x) % kThreads; }
  static MARLIN_DEVICE void Sync() {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      SyncFirst<kThreads>();
    }
  }
  static MARLIN_DEVICE bool Any(bool mine) {
    if constexpr (kWarps == 1) {
      return __any_sync(kAll, mine) != 0;
    } else {
      return SyncFirstAny<kThreads>(mine);
    }
  }
  MARLIN_DEVICE double Sum(double value) const {
    return Reduce(value, [](double a, double b) { return a + b; });
  }
  MARLIN_DEVICE double Max(double value) const {
    return Reduce(value, [](double a, double b) { return fmax(a, b); });
  }

 private:
  template <typename Combine>
  MARLIN_DEVICE double Reduce(double value, const Combine& combine) const {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      value = combine(value, __shfl_xor_sync(kAll, value, step));
    }
    if constexpr (kWarps > 1) {
      if (threadIdx.x % 32 == 0) exchange[threadIdx.x / 32] = value;
      SyncFirst<kThreads>();
      value = exchange[0];
#pragma unroll
      for (int warp = 1; warp < kWarps; ++warp) value = combine(value, exchange[warp]);
      SyncFirst<kThreads>();
    }
    return value;
  }
};

MARLIN_DEVICE void Record(const ErrorView& errors, unsigned long long key) {
  atomicMin(&errors.record->router, key);
  *errors.any = 1;
}

/// Routes one token with a team. `scores`: shared memory, 2 x experts.
template <int kWarps>
class TokenRouter {
 public:
  MARLIN_DEVICE TokenRouter(const RouterArguments& args, int token, double* scores,
                            double* exchange)
      : TokenRouter(args, token, args.logits + token * args.logits_stride, scores, exchange) {}
  /// With the token's logits anywhere.
  MARLIN_DEVICE TokenRouter(const RouterArguments& args, int token, const float* logits,
                            double* scores, double* exchange)
      : args_(args),
        token_(token),
        team_{exchange},
        lane_(static_cast<int>(threadIdx.x) & 31),
        rank_(Team<kWarps>::Rank()),
        logits_(logits),
        choice_(scores),
        score_(choice_ + args.experts) {}

  MARLIN_DEVICE void Route() {
    if (Select() && rank_ < 32) Weigh();
  }

  /// Writes the ids; false, with a record of why, for logits that cannot be routed. Called by all
  /// threads of the team.
  MARLIN_DEVICE bool Select() {
    if (!CheckLogits()) return false;
    Score();
    team_.Sync();
    if (args_.top_groups < args_.groups) {
      if (rank_ < 32) DropGroups();
      team_.Sync();
    }
    int32_t* const ids = args_.ids + token_ * args_.ids_stride;
    if constexpr (kWarps == 1) {
      TakeBest(ids);
    } else {
      RankAll(ids);
    }
    team_.Sync();
    return true;
  }

  /// Writes the weights in the order of the selection. Called by one warp: each lane divides for
  /// one selection, and all add the scores in the CPU's order.
  MARLIN_DEVICE void Weigh() const {
    const int32_t* const ids = args_.ids + token_ * args_.ids_stride;
    float* const weights = args_.weights + token_ * args_.weights_stride;
    if (OfChosen()) ScoreChosen(ids);
    // All chosen scores may underflow to 0, which must not become 0 / 0: see the CPU's router.
    double sum = 1e-20;
    for (int i = 0; i < args_.top_k; ++i) sum += score_[ids[i]];
    if (!OfChosen()) sum = fmax(sum, args_.least_sum);
    const bool divide = args_.normalize || OfChosen();
    for (int i = lane_; i < args_.top_k; i += 32) {
      double weight = score_[ids[i]] / (divide ? sum : 1.0) * args_.scaling_factor;
      if (args_.scales != nullptr) weight *= static_cast<double>(args_.scales[ids[i]]);
      weights[i] = static_cast<float>(weight);
    }
  }

 private:
  MARLIN_DEVICE bool OfChosen() const { return args_.scoring == kSoftmaxOfChosen; }

  /// Records the first logit that has no softmax or sigmoid.
  MARLIN_DEVICE bool CheckLogits() const {
    unsigned long long key = ValueRecord::kNone;
    bool finite = false;
    for (int e = rank_; e < args_.experts; e += kThreads) {
      const float logit = logits_[e];
      finite = finite || isfinite(logit);
      const bool bad = isnan(logit) || (isinf(logit) && logit > 0);
      if (!bad) continue;
      const auto error = isnan(logit) ? LogitError::kNaN : LogitError::kInf;
      key = min(key, RouterKey(error, token_, e));
    }
    if (!Team<kWarps>::Any(finite) && rank_ == 0) {
      key = min(key, RouterKey(LogitError::kNoFinite, token_, args_.experts));
    }
    if (key != ValueRecord::kNone) Record(args_.errors, key);
    return !Team<kWarps>::Any(key != ValueRecord::kNone);
  }

  MARLIN_DEVICE void Score() {
    const bool sigmoid = args_.scoring == kSigmoid;
    double largest = Never();
    for (int e = rank_; e < args_.experts; e += kThreads) {
      largest = fmax(largest, static_cast<double>(logits_[e]));
    }
    largest = team_.Max(largest);
    double sum = 0;
    for (int e = rank_; e < args_.experts; e += kThreads) {
      const double logit = logits_[e];
      const double score = sigmoid ? 1.0 / (1.0 + exp(-logit)) : exp(logit - largest);
      score_[e] = score;
      sum += score;
    }
    sum = team_.Sum(sum);
    for (int e = rank_; e < args_.experts; e += kThreads) {
      if (!sigmoid) score_[e] /= sum;
      const double basis = OfChosen() ? static_cast<double>(logits_[e]) : score_[e];
      const double bias = args_.bias == nullptr ? 0.0 : static_cast<double>(args_.bias[e]);
      // A selectable expert stays above excluded ones, even with a logit of -Inf.
      choice_[e] = fmax(basis + bias, -DBL_MAX);
    }
  }

  /// One selection after another.
  MARLIN_DEVICE void TakeBest(int32_t* ids) {
    for (int i = 0; i < args_.top_k; ++i) {
      const int best = Best();
      if (lane_ == 0) {
        ids[i] = best;
        choice_[best] = Never();
      }
      __syncwarp();
    }
  }

  /// All selections at once: an expert's place is the number of experts before it, which up to four
  /// adjacent threads count. Several warps are faster at all comparisons than one at its chain of
  /// reductions.
  MARLIN_DEVICE void RankAll(int32_t* ids) const {
    const int shift = 4 * args_.experts <= kThreads ? 2 : 2 * args_.experts <= kThreads ? 1 : 0;
    const int parts = 1 << shift;
    const int part = rank_ & (parts - 1);
    // Every thread takes part in the shuffles.
    for (int first = 0; first < args_.experts; first += kThreads >> shift) {
      const int e = first + (rank_ >> shift);
      const double mine = e < args_.experts ? choice_[e] : Never();
      int before = 0;
#pragma unroll 8
      for (int other = part; other < args_.experts; other += parts) {
        const double choice = choice_[other];
        before += choice > mine || (choice == mine && other < e) ? 1 : 0;
      }
      if (shift > 0) before += __shfl_xor_sync(kAll, before, 1);
      if (shift > 1) before += __shfl_xor_sync(kAll, before, 2);
      if (part == 0 && mine != Never() && before < args_.top_k) ids[before] = e;
    }
  }

  /// The expert with the largest choice; ties go to the lower one.
  MARLIN_DEVICE int Best() const {
    double best = Never();
    int at = 0x7fffffff;
    for (int e = lane_; e < args_.experts; e += 32) {
      if (at == 0x7fffffff || choice_[e] > best) {
        best = choice_[e];
        at = e;
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const double other = __shfl_xor_sync(kAll, best, step);
      const int other_at = __shfl_xor_sync(kAll, at, step);
      const bool exists = other_at != 0x7fffffff;
      if (exists && (at == 0x7fffffff || other > best || (other == best && other_at < at))) {
        best = other;
        at = other_at;
      }
    }
    return at;
  }

  /// Group-limited routing: excludes all experts outside of the top_groups groups. A group's score
  /// is the sum of its one or two best experts; ties drop the later group.
  MARLIN_DEVICE void DropGroups() {
    const int size = args_.experts / args_.groups;
    for (int dropped = args_.top_groups; dropped < args_.groups; ++dropped) {
      int worst = -1;
      double worst_sum = 0;
      for (int group = 0; group < args_.groups; ++group) {
        const double* const first = choice_ + group * size;
        if (first[0] == Never()) continue;
        const double sum = ScoreOfGroup(first, size);
        if (worst < 0 || sum <= worst_sum) {
          worst = group;
          worst_sum = sum;
        }
      }
      __syncwarp();
      for (int e = lane_; e < size; e += 32) choice_[worst * size + e] = Never();
      __syncwarp();
    }
  }

  MARLIN_DEVICE double ScoreOfGroup(const double* values, int count) const {
    double best = Never();
    double second = Never();
    for (int i = lane_; i < count; i += 32) {
      second = fmax(second, fmin(best, values[i]));
      best = fmax(best, values[i]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const double other = __shfl_xor_sync(kAll, best, step);
      const double other_second = __shfl_xor_sync(kAll, second, step);
      second = fmax(fmax(second, other_second), fmin(best, other));
      best = fmax(best, other);
    }
    return count > 1 && args_.best_of_group == 2 ? best + second : best;
  }

  /// Softmax over the selected experts, relative to their own largest logit.
  MARLIN_DEVICE void ScoreChosen(const int32_t* ids) const {
    double largest = Never();
    for (int i = 0; i < args_.top_k; ++i) {
      largest = fmax(largest, static_cast<double>(logits_[ids[i]]));
    }
    for (int i = lane_; i < args_.top_k; i += 32) {
      const double logit = logits_[ids[i]];
      // If no selected expert has a finite logit, all get equal weights.
      score_[ids[i]] = largest == Never() ? 1.0 : exp(logit - largest);
    }
    __syncwarp();
  }

  static constexpr int kThreads = Team<kWarps>::kThreads;

  const RouterArguments& args_;
  int token_;
  Team<kWarps> team_;
  int lane_;  ///< In the warp.
  int rank_;  ///< In the team.
  const float* logits_;
  double* choice_;
  double* score_;
};

/// Records biases that are NaN. Called by the threads of one CTA.
MARLIN_DEVICE void CheckBias(const RouterArguments& args,
                             int threads = static_cast<int>(blockDim.x)) {
  if (blockIdx.x != 0 || args.bias == nullptr) return;
  for (int e = static_cast<int>(threadIdx.x); e < args.experts; e += threads) {
    if (isnan(args.bias[e])) Record(args.errors, RouterKey(LogitError::kNaNBias, 0, e));
  }
}

}  // namespace marlin::cuda
