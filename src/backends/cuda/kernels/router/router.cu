// MoE routing: top-k expert selection, one warp per token. Scores are in double, as in the CPU's
// router (backends/cpu/cpu_router.cc), so that rounding does not decide the selection. They are in
// shared memory, 2 x experts for a token.
#include <cfloat>
#include <cmath>

#include "backends/cuda/kernels/common/async_copy.cuh"
#include "backends/cuda/kernels/common/launch.h"
#include "backends/cuda/kernels/router/router_launch.h"
#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {
namespace {

constexpr int kMostWarps = 4;
constexpr int kSharedBytes = DeviceShape().shared_bytes;

constexpr int64_t BytesOfToken(int64_t experts) { return 2 * experts * int64_t{sizeof(double)}; }
static_assert(BytesOfToken(kMostRouterExperts) <= kSharedBytes);
constexpr int kSoftmaxOfChosen = 1;
constexpr int kSigmoid = 2;
constexpr unsigned kAll = 0xffffffffU;

MARLIN_DEVICE double Never() { return -INFINITY; }

MARLIN_DEVICE double SumOfWarp(double value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAll, value, step);
  return value;
}
MARLIN_DEVICE double MaxOfWarp(double value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    value = fmax(value, __shfl_xor_sync(kAll, value, step));
  }
  return value;
}

MARLIN_DEVICE void Record(const ErrorView& errors, unsigned long long key) {
  atomicMin(&errors.record->router, key);
  *errors.any = 1;
}

/// Routes one token with one warp.
class TokenRouter {
 public:
  MARLIN_DEVICE TokenRouter(const RouterArguments& args, int token, double* scores)
      : args_(args),
        token_(token),
        lane_(static_cast<int>(threadIdx.x) & 31),
        logits_(args.logits + token * args.logits_stride),
        choice_(scores),
        score_(choice_ + args.experts) {}

  MARLIN_DEVICE void Route() {
    if (!CheckLogits()) return;
    Score();
    __syncwarp();
    if (args_.top_groups < args_.groups) DropGroups();
    int32_t* const ids = args_.ids + token_ * args_.ids_stride;
    for (int i = 0; i < args_.top_k; ++i) {
      const int best = Best();
      if (lane_ == 0) {
        ids[i] = best;
        choice_[best] = Never();
      }
      __syncwarp();
    }
    Weigh(ids);
  }

 private:
  MARLIN_DEVICE bool OfChosen() const { return args_.scoring == kSoftmaxOfChosen; }

  /// Records the first logit that has no softmax or sigmoid.
  MARLIN_DEVICE bool CheckLogits() const {
    unsigned long long key = ValueRecord::kNone;
    bool finite = false;
    for (int e = lane_; e < args_.experts; e += 32) {
      const float logit = logits_[e];
      finite = finite || isfinite(logit);
      const bool bad = isnan(logit) || (isinf(logit) && logit > 0);
      if (!bad) continue;
      const auto error = isnan(logit) ? LogitError::kNaN : LogitError::kInf;
      key = min(key, RouterKey(error, token_, e));
    }
    if (!__any_sync(kAll, finite) && lane_ == 0) {
      key = min(key, RouterKey(LogitError::kNoFinite, token_, args_.experts));
    }
    if (key != ValueRecord::kNone) Record(args_.errors, key);
    return !__any_sync(kAll, key != ValueRecord::kNone);
  }

  MARLIN_DEVICE void Score() {
    const bool sigmoid = args_.scoring == kSigmoid;
    double largest = Never();
    for (int e = lane_; e < args_.experts; e += 32) {
      largest = fmax(largest, static_cast<double>(logits_[e]));
    }
    largest = MaxOfWarp(largest);
    double sum = 0;
    for (int e = lane_; e < args_.experts; e += 32) {
      const double logit = logits_[e];
      const double score = sigmoid ? 1.0 / (1.0 + exp(-logit)) : exp(logit - largest);
      score_[e] = score;
      sum += score;
    }
    sum = SumOfWarp(sum);
    for (int e = lane_; e < args_.experts; e += 32) {
      if (!sigmoid) score_[e] /= sum;
      const double basis = OfChosen() ? static_cast<double>(logits_[e]) : score_[e];
      const double bias = args_.bias == nullptr ? 0.0 : static_cast<double>(args_.bias[e]);
      // A selectable expert stays above excluded ones, even with a logit of -Inf.
      choice_[e] = fmax(basis + bias, -DBL_MAX);
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
  /// is the sum of its two best experts; ties drop the later group.
  MARLIN_DEVICE void DropGroups() {
    const int size = args_.experts / args_.groups;
    for (int dropped = args_.top_groups; dropped < args_.groups; ++dropped) {
      int worst = -1;
      double worst_sum = 0;
      for (int group = 0; group < args_.groups; ++group) {
        const double* const first = choice_ + group * size;
        if (first[0] == Never()) continue;
        const double sum = TopTwo(first, size);
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

  MARLIN_DEVICE double TopTwo(const double* values, int count) const {
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
    return count > 1 ? best + second : best;
  }

  /// Weights in the order of the selection. One lane: the sum has the order of the CPU's.
  MARLIN_DEVICE void Weigh(const int32_t* ids) {
    if (lane_ != 0) return;
    if (OfChosen()) ScoreChosen(ids);
    // All chosen scores may underflow to 0, which must not become 0 / 0: see the CPU's router.
    double sum = 1e-20;
    for (int i = 0; i < args_.top_k; ++i) sum += score_[ids[i]];
    const bool divide = args_.normalize || OfChosen();
    float* const weights = args_.weights + token_ * args_.weights_stride;
    for (int i = 0; i < args_.top_k; ++i) {
      const double weight = score_[ids[i]] / (divide ? sum : 1.0);
      weights[i] = static_cast<float>(weight * args_.scaling_factor);
    }
  }

  /// Softmax over the selected experts, relative to their own largest logit.
  MARLIN_DEVICE void ScoreChosen(const int32_t* ids) {
    double largest = Never();
    for (int i = 0; i < args_.top_k; ++i) {
      largest = fmax(largest, static_cast<double>(logits_[ids[i]]));
    }
    for (int i = 0; i < args_.top_k; ++i) {
      const double logit = logits_[ids[i]];
      // If no selected expert has a finite logit, all get equal weights.
      score_[ids[i]] = largest == Never() ? 1.0 : exp(logit - largest);
    }
  }

  const RouterArguments& args_;
  int token_;
  int lane_;
  const float* logits_;
  double* choice_;
  double* score_;
};

__global__ void __launch_bounds__(kMostWarps * 32)
    RouterKernel(const __grid_constant__ RouterArguments args) {
  extern __shared__ double scores[];
  WaitForEarlierWork();
  TriggerDependentLaunch();
  const auto threads = static_cast<int>(blockDim.x);
  if (blockIdx.x == 0 && args.bias != nullptr) {
    for (int e = static_cast<int>(threadIdx.x); e < args.experts; e += threads) {
      if (isnan(args.bias[e])) Record(args.errors, RouterKey(LogitError::kNaNBias, 0, e));
    }
  }
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int token = static_cast<int>(blockIdx.x) * (threads / 32) + warp;
  if (token >= args.tokens) return;
  TokenRouter(args, token, scores + warp * 2 * args.experts).Route();
}

}  // namespace

cudaError_t LoadRouter() { return AllowAllShared(reinterpret_cast<const void*>(&RouterKernel)); }

cudaError_t LaunchRouter(const RouterArguments& args, cudaStream_t stream) {
  const int64_t bytes = BytesOfToken(args.experts);
  const auto warps = static_cast<unsigned>(
      bytes * kMostWarps <= kSharedBytes ? int64_t{kMostWarps} : kSharedBytes / bytes);
  const unsigned blocks = (static_cast<unsigned>(args.tokens) + warps - 1) / warps;
  RouterKernel<<<blocks, warps * 32, static_cast<size_t>(bytes) * warps, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace marlin::cuda
