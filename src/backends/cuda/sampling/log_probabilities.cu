// The log-probabilities of tokens, and the most likely tokens of a row. A CTA takes a row, whatever
// the number of rows: sums are added in the same order, and a row has the same bits in any batch.
//
//   The most likely tokens are found one by one, as in a tournament: each thread holds the best of
//   its ids (thread, thread + kThreads, ...), and once it has won, the whole CTA finds the next
//   best of its ids.
#include <cmath>

#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/decoder/operations.h"
#include "backends/cuda/rows/record_error.cuh"
#include "backends/cuda/sampling/logit_keys.cuh"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

using TokenKeys = unsigned long long;

struct LogProbabilitiesArguments {
  const float* logits = nullptr;
  int64_t logits_stride = 0;
  const int32_t* ids = nullptr;
  float* of_ids = nullptr;
  int32_t* likely_ids = nullptr;
  float* of_likely = nullptr;
  int likely = 0;
  int vocab = 0;
  ErrorView errors;
};

struct Shared {
  TokenKeys keys[kWarps];
  double sums[kWarps];
};

/// One row. All functions are called by all threads of the CTA.
class RowRanking {
 public:
  MARLIN_DEVICE RowRanking(const LogProbabilitiesArguments& args, Shared& shared)
      : args_(args),
        shared_(shared),
        row_(static_cast<int64_t>(blockIdx.x)),
        logits_(args.logits + row_ * args.logits_stride) {}

  MARLIN_DEVICE void Run() {
    const bool valid = FindBest();
    const double log_sum = valid ? log(Sum()) : 0.0;
    WriteOfId(valid, log_sum);
    for (int place = 0; place < args_.likely; ++place) {
      const TokenKeys winner = valid ? Largest(mine_) : 0;
      if (threadIdx.x == 0) {
        const int64_t at = row_ * args_.likely + place;
        args_.likely_ids[at] = valid ? IdOfToken(winner) : -1;
        args_.of_likely[at] = valid ? LogOf(LogitOfToken(winner), log_sum) : NAN;
      }
      if (valid && place + 1 < args_.likely) Replace(winner);
    }
  }

 private:
  /// The best token of each thread, and of all; returns whether the row has probabilities.
  MARLIN_DEVICE bool FindBest() {
    bool numbers = true;
    for (int id = static_cast<int>(threadIdx.x); id < args_.vocab; id += kThreads) {
      const float logit = logits_[id];
      numbers &= logit < INFINITY;
      mine_ = max(mine_, TokenKey(logit, id));
    }
    if (__syncthreads_and(numbers ? 1 : 0) == 0) return false;
    best_ = LogitOfToken(Largest(mine_));
    return best_ != -INFINITY;
  }

  /// The sum of exp(logit - best).
  MARLIN_DEVICE double Sum() {
    double sum = 0;
    for (int id = static_cast<int>(threadIdx.x); id < args_.vocab; id += kThreads) {
      sum += static_cast<double>(expf(logits_[id] - best_));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) shared_.sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += shared_.sums[warp];
    return sum;
  }

  MARLIN_DEVICE float LogOf(float logit, double log_sum) const {
    return static_cast<float>(static_cast<double>(logit) - static_cast<double>(best_) - log_sum);
  }

  MARLIN_DEVICE void WriteOfId(bool valid, double log_sum) const {
    if (threadIdx.x != 0) return;
    const int id = args_.ids[row_];
    if (id >= args_.vocab) RecordError(args_.errors, ValueError::kIds, id, row_, args_.vocab);
    const bool has = valid && id >= 0 && id < args_.vocab;
    args_.of_ids[row_] = has ? LogOf(logits_[id], log_sum) : NAN;
  }

  MARLIN_DEVICE TokenKeys Largest(TokenKeys key) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) key = max(key, __shfl_xor_sync(~0u, key, step));
    __syncthreads();  // The keys of the last call have been read.
    if (threadIdx.x % 32 == 0) shared_.keys[threadIdx.x / 32] = key;
    __syncthreads();
    key = shared_.keys[threadIdx.x % kWarps];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) key = max(key, __shfl_xor_sync(~0u, key, step));
    return key;
  }

  /// Gives the thread of the winner the best of its ids after it.
  MARLIN_DEVICE void Replace(TokenKeys winner) {
    const int owner = IdOfToken(winner) % kThreads;
    TokenKeys next = 0;
    for (int64_t id = owner + static_cast<int64_t>(threadIdx.x) * kThreads; id < args_.vocab;
         id += int64_t{kThreads} * kThreads) {
      const TokenKeys key = TokenKey(logits_[id], static_cast<int>(id));
      if (key < winner) next = max(next, key);
    }
    next = Largest(next);
    if (static_cast<int>(threadIdx.x) == owner) mine_ = next;
  }

  const LogProbabilitiesArguments& args_;
  Shared& shared_;
  int64_t row_;
  const float* logits_;
  TokenKeys mine_ = 0;
  float best_ = 0.0f;
};

/// A CTA for each row.
__global__ void __launch_bounds__(kThreads)
    LogProbabilitiesKernel(const __grid_constant__ LogProbabilitiesArguments args) {
  __shared__ Shared shared;
  EnterChain();
  RowRanking(args, shared).Run();
}

}  // namespace

Status Run(const LogProbabilitiesCall& call, const CallContext& context) {
  const LogProbabilitiesArguments args = {call.logits.As<float>(),
                                          call.logits.stride(0),
                                          call.ids.As<int32_t>(),
                                          call.out.of_ids.As<float>(),
                                          call.out.likely_ids.As<int32_t>(),
                                          call.out.of_likely.As<float>(),
                                          static_cast<int>(call.out.likely_ids.dim(1)),
                                          static_cast<int>(call.logits.dim(1)),
                                          context.errors};
  const dim3 grid(static_cast<unsigned>(call.logits.dim(0)));
  return context.Launch("log_probabilities", &LogProbabilitiesKernel, grid, kThreads, args);
}

}  // namespace marlin::cuda
