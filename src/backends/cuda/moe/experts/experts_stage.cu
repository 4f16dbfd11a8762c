// The kernels around the experts' GEMMs: staged rows, and the weighted sum.
#include <algorithm>

#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/moe/experts/experts_kernels.h"
#include "backends/cuda/moe/experts/experts_rows.cuh"
#include "backends/cuda/rows/typed.cuh"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
/// CTAs of a multiprocessor, at least: without it, values of the staging kernels are spilled.
constexpr int kResident = 2;
/// CTAs that stride over rows, at most.
constexpr int kMostBlocks = 1024;

/// The slot of a token's selection `s`, or of the shared expert after all of them; -1: it is not
/// staged.
MARLIN_DEVICE int TargetOf(const StageRowsArguments& args, int token, int s) {
  const SlotsView& slots = args.slots;
  if (s == args.top_k) {
    return args.members[slots.experts] != 0 ? slots.begin[slots.experts] + token : -1;
  }
  const int64_t selection = static_cast<int64_t>(token) * args.top_k + s;
  const int slot = slots.slot_of[selection];
  return slot >= 0 && args.members[args.ids[selection]] != 0 ? slot : -1;
}

/// Eight adjacent elements of a row, of which the last ones may be zeros, as they are staged.
template <typename T>
struct EightOperands {
  using Element = uint16_t;
  uint4 packed;

  MARLIN_DEVICE EightOperands(const ExpertRows& rows, int64_t first, int count)
      : packed(LoadOperands<T>(rows, first, count)) {}
  MARLIN_DEVICE void Store(uint16_t* to) const { *reinterpret_cast<uint4*>(to) = packed; }
};
struct EightFloats {
  using Element = float;
  float values[8];

  MARLIN_DEVICE EightFloats(const ExpertRows& rows, int64_t first, int count) {
    LoadEight(rows, first, count, values);
  }
  MARLIN_DEVICE void Store(float* to) const {
    reinterpret_cast<float4*>(to)[0] = {values[0], values[1], values[2], values[3]};
    reinterpret_cast<float4*>(to)[1] = {values[4], values[5], values[6], values[7]};
  }
};

/// blockIdx.x: token; blockIdx.y and the threads: eight columns each, which are read and rounded
/// once and stored to all slots of the token.
template <typename Eight>
__global__ void __launch_bounds__(kThreads, kResident)
    StageTokensKernel(const __grid_constant__ StageRowsArguments args) {
  extern __shared__ int targets[];
  WaitForEarlierWork();
  TriggerDependentLaunch();
  const auto token = static_cast<int>(blockIdx.x);
  const int column = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) * 8;
  const Eight eight(args.rows, token * args.rows.stride + column, args.k - column);
  const int count = args.top_k + (args.shared ? 1 : 0);
  for (auto s = static_cast<int>(threadIdx.x); s < count; s += kThreads) {
    targets[s] = TargetOf(args, token, s);
  }
  __syncthreads();
  if (column >= args.k) return;
  auto* const to = static_cast<typename Eight::Element*>(args.out) + column;
  const int64_t stride = StagedStride(args.k);
#pragma unroll 4
  for (int s = 0; s < count; ++s) {
    if (targets[s] >= 0) eight.Store(to + targets[s] * stride);
  }
}

template <typename T>
MARLIN_DEVICE void StageRow(const StageRowsArguments& args, int slot, int lane) {
  const auto chunks = static_cast<int>(StagedStride(args.k) / 8);
  uint4* const to = static_cast<uint4*>(args.out) + static_cast<int64_t>(slot) * chunks;
#pragma unroll 4
  for (int i = lane; i < chunks; i += 32) {
    float values[8];
    LoadEightGated(args.rows, slot, args.k, i * 8, values);
    to[i] = PackEight<T>(values);
  }
}

MARLIN_DEVICE void StageFloats(const StageRowsArguments& args, int slot, int lane) {
  const float* const gates = static_cast<const float*>(args.rows.data) + slot * args.rows.stride;
  const float* const ups = gates + args.k;
  float* const to = static_cast<float*>(args.out) + slot * StagedStride(args.k);
#pragma unroll 4
  for (int k = lane; k < args.k; k += 32) to[k] = GateProduct(args.rows.gate, gates[k], ups[k]);
}

/// Gated activations. blockIdx.x: expert; blockIdx.y and the warps stride over its rows.
__global__ void __launch_bounds__(kThreads, kResident)
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
  // The L2 cache keeps the sums, not what is read for the last time.
  if (args.hidden % 4 == 0) return __ldcs(reinterpret_cast<const float4*>(from));
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
    const int64_t at = token * args.out_stride + column;
    if (args.quads) {
      StoreFour(args.out, args.out_type, at, {sum[0], sum[1], sum[2], sum[3]});
      continue;
    }
    for (int i = 0; i < 4 && column + i < args.hidden; ++i) {
      StoreFloat(args.out, args.out_type, at + i, sum[i]);
    }
  }
}

}  // namespace

cudaError_t LoadExpertKernels() {
  const cudaError_t error = LoadSort();
  if (error != cudaSuccess) return error;
  return PrepareKernels(&StageTokensKernel<EightFloats>, &StageTokensKernel<EightOperands<Bf16x2>>,
                        &StageTokensKernel<EightOperands<F16x2>>, &StageRowsKernel, &SumKernel);
}

namespace {

cudaError_t LaunchStageTokens(const StageRowsArguments& args, cudaStream_t stream) {
  constexpr int kColumns = 8 * kThreads;
  const dim3 blocks(static_cast<unsigned>(args.tokens),
                    static_cast<unsigned>((args.k + kColumns - 1) / kColumns));
  const auto kernel = args.type == Element::kF32    ? &StageTokensKernel<EightFloats>
                      : args.type == Element::kBf16 ? &StageTokensKernel<EightOperands<Bf16x2>>
                                                    : &StageTokensKernel<EightOperands<F16x2>>;
  return LaunchInChain(kernel, blocks, kThreads, (args.top_k + 1) * int{sizeof(int)}, stream, args);
}

}  // namespace

cudaError_t LaunchStageRows(const StageRowsArguments& args, int rows_per_expert,
                            cudaStream_t stream) {
  if (!args.rows.gated) return LaunchStageTokens(args, stream);
  const dim3 blocks(static_cast<unsigned>(args.slots.experts) + 1,
                    static_cast<unsigned>(std::clamp(rows_per_expert / kWarps, 1, kMostBlocks)));
  return LaunchInChain(&StageRowsKernel, blocks, kThreads, 0, stream, args);
}

cudaError_t LaunchSum(const SumArguments& given, cudaStream_t stream) {
  SumArguments args = given;
  const uintptr_t bytes = args.out_type == Element::kF32 ? 16 : 8;
  args.quads = args.hidden % 4 == 0 && args.out_stride % 4 == 0 &&
               reinterpret_cast<uintptr_t>(args.out) % bytes == 0;
  constexpr int kColumns = 4 * kThreads;
  const dim3 blocks(static_cast<unsigned>(std::max((args.hidden + kColumns - 1) / kColumns, 1)),
                    static_cast<unsigned>(std::clamp(args.tokens, 1, kMostBlocks)));
  return LaunchInChain(&SumKernel, blocks, kThreads, 0, stream, args);
}

}  // namespace marlin::cuda
