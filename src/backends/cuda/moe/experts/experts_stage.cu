// The kernels around the experts' GEMMs: staged rows, and the weighted sum.
#include <algorithm>

#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/moe/experts/experts_kernels.h"
#include "backends/cuda/moe/experts/experts_rows.cuh"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
/// CTAs that stride over rows, at most.
constexpr int kMostBlocks = 1024;

template <typename T>
MARLIN_DEVICE void StageRow(const StageRowsArguments& args, int slot, int lane) {
  const auto chunks = static_cast<int>(StagedStride(args.k) / 8);
  uint4* const to = static_cast<uint4*>(args.out) + static_cast<int64_t>(slot) * chunks;
#pragma unroll 4
  for (int i = lane; i < chunks; i += 32) {
    to[i] = LoadEightOfRow<T>(args.rows, args.slots.token, slot, args.k, i * 8);
  }
}

MARLIN_DEVICE void StageFloats(const StageRowsArguments& args, int slot, int lane) {
  float* const to = static_cast<float*>(args.out) + slot * StagedStride(args.k);
#pragma unroll 4
  for (int k = lane; k < args.k; k += 32) {
    to[k] = LoadRowElement(args.rows, args.slots.token, slot, args.k, k);
  }
}

/// blockIdx.x: expert; blockIdx.y and the warps stride over its rows.
__global__ void __launch_bounds__(kThreads)
    StageRowsKernel(const __grid_constant__ StageRowsArguments args) {
  WaitForEarlierWork();
  TriggerDependentLaunch();
  const auto expert = static_cast<int>(blockIdx.x);
  if (args.members[expert] == 0) return;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const auto warp = static_cast<int>(blockIdx.y * kWarps + (threadIdx.x >> 5));
  const int end = args.slots.begin[expert + 1];
  for (int slot = args.slots.begin[expert] + warp; slot < end;
       slot += static_cast<int>(gridDim.y) * kWarps) {
    if (args.type == Element::kF32) {
      StageFloats(args, slot, lane);
    } else if (args.type == Element::kBf16) {
      StageRow<Bf16x2>(args, slot, lane);
    } else {
      StageRow<F16x2>(args, slot, lane);
    }
  }
}

/// Up to four adjacent columns of a result; zeros beyond `hidden`.
MARLIN_DEVICE float4 LoadFour(const SumArguments& args, int slot, int column) {
  const float* const from = args.results + static_cast<int64_t>(slot) * args.hidden + column;
  if (args.hidden % 4 == 0) return *reinterpret_cast<const float4*>(from);
  const auto at = [&](int i) { return column + i < args.hidden ? from[i] : 0.0f; };
  return {at(0), at(1), at(2), at(3)};
}

constexpr int kSumsAtOnce = 8;

/// Up to kSumsAtOnce selections of a token. All loads of one kind are in flight together.
struct Selections {
  int slots[kSumsAtOnce];
  float weights[kSumsAtOnce];

  /// Selections `first` to `first` + count - 1.
  MARLIN_DEVICE Selections(const SumArguments& args, int64_t first, int count) {
#pragma unroll
    for (int s = 0; s < kSumsAtOnce; ++s) {
      slots[s] = s < count ? args.slots.slot_of[first + s] : -1;
      weights[s] = s < count ? args.weights[first + s] : 0.0f;
    }
  }

  /// Calls add(result, weight) in their order.
  template <typename Add>
  MARLIN_DEVICE void ForEach(const SumArguments& args, int column, const Add& add) const {
    float4 results[kSumsAtOnce];
#pragma unroll
    for (int s = 0; s < kSumsAtOnce; ++s) {
      if (slots[s] >= 0) results[s] = LoadFour(args, slots[s], column);
    }
#pragma unroll
    for (int s = 0; s < kSumsAtOnce; ++s) {
      if (slots[s] >= 0) add(results[s], weights[s]);
    }
  }
};

/// blockIdx.x and the threads: four columns each; blockIdx.y strides over the tokens.
__global__ void __launch_bounds__(kThreads) SumKernel(const __grid_constant__ SumArguments args) {
  if (!args.sorted_early) WaitForEarlierWork();
  const int column = static_cast<int>(blockIdx.x * kThreads + threadIdx.x) * 4;
  const int routed = args.shared ? args.slots.begin[args.slots.experts] : 0;
  const auto selections_of = [&](int token, int s) {
    const int64_t first = static_cast<int64_t>(token) * args.top_k + s;
    return Selections(args, first, token < args.tokens ? min(args.top_k - s, kSumsAtOnce) : 0);
  };
  const auto first_token = static_cast<int>(blockIdx.y);
  Selections selections = selections_of(first_token, 0);
  if (args.sorted_early) WaitForEarlierWork();
  TriggerDependentLaunch();
  if (column >= args.hidden) return;
  for (int token = first_token; token < args.tokens; token += static_cast<int>(gridDim.y)) {
    float sum[4] = {};
    bool empty = true;
    const auto add = [&](const float4& result, float weight) {
      const float terms[4] = {result.x * weight, result.y * weight, result.z * weight,
                              result.w * weight};
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = empty ? terms[i] : sum[i] + terms[i];
      empty = false;
    };
    for (int s = 0; s < args.top_k; s += kSumsAtOnce) {
      if (token != first_token || s > 0) selections = selections_of(token, s);
      selections.ForEach(args, column, add);
    }
    if (args.shared) {
      const int slot = routed + token;
      const float weight = args.shared_scores == nullptr
                               ? 1.0f
                               : TimesSigmoid(1.0f, args.shared_scores[slot * args.score_stride]);
      add(LoadFour(args, slot, column), weight);
    }
    for (int i = 0; i < 4 && column + i < args.hidden; ++i) {
      StoreFloat(args.out, args.out_type, token * args.out_stride + column + i, sum[i]);
    }
  }
}

}  // namespace

cudaError_t LoadExpertKernels() {
  cudaError_t error = LoadSort();
  if (error == cudaSuccess) error = PreferShared(reinterpret_cast<const void*>(&StageRowsKernel));
  if (error == cudaSuccess) error = PreferShared(reinterpret_cast<const void*>(&SumKernel));
  return error;
}

cudaError_t LaunchStageRows(const StageRowsArguments& args, int rows_per_expert,
                            cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(args.slots.experts) + 1,
                    static_cast<unsigned>(std::clamp(rows_per_expert / kWarps, 1, kMostBlocks)));
  return LaunchInChain(&StageRowsKernel, blocks, kThreads, 0, stream, args);
}

cudaError_t LaunchSum(const SumArguments& args, cudaStream_t stream) {
  constexpr int kColumns = 4 * kThreads;
  const dim3 blocks(static_cast<unsigned>(std::max((args.hidden + kColumns - 1) / kColumns, 1)),
                    static_cast<unsigned>(std::clamp(args.tokens, 1, kMostBlocks)));
  return LaunchInChain(&SumKernel, blocks, kThreads, 0, stream, args);
}

}  // namespace marlin::cuda
