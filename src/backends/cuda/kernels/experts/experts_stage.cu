// The kernels around the experts' GEMMs: staged rows for the exact kernel, and the weighted sum.
#include "backends/cuda/kernels/common/async_copy.cuh"
#include "backends/cuda/kernels/common/launch.h"
#include "backends/cuda/kernels/experts/experts_kernels.h"
#include "backends/cuda/kernels/experts/experts_rows.cuh"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    StageRowsKernel(const __grid_constant__ StageRowsArguments args) {
  WaitForEarlierWork();
  TriggerDependentLaunch();
  const auto expert = static_cast<int>(blockIdx.x);
  if (args.members[expert] == 0) return;
  const Element type = args.rows.gated ? Element::kF32 : args.rows.type;
  for (int slot = args.slots.begin[expert]; slot < args.slots.begin[expert + 1]; ++slot) {
    for (int k = static_cast<int>(threadIdx.x); k < args.k; k += kThreads) {
      const int64_t to = static_cast<int64_t>(slot) * args.k + k;
      StoreFloat(args.out, type, to, LoadRowElement(args.rows, args.slots, slot, args.k, k));
    }
  }
}

__global__ void __launch_bounds__(kThreads) SumKernel(const __grid_constant__ SumArguments args) {
  WaitForEarlierWork();
  TriggerDependentLaunch();
  const int64_t count = static_cast<int64_t>(args.tokens) * args.hidden;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int routed = args.shared ? args.slots.begin[args.slots.experts] : 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += step) {
    const int64_t token = i / args.hidden;
    const int column = static_cast<int>(i % args.hidden);
    float sum = 0.0f;
    bool empty = true;
    const auto add = [&](int slot, float weight) {
      const float term = args.results[static_cast<int64_t>(slot) * args.hidden + column] * weight;
      sum = empty ? term : sum + term;
      empty = false;
    };
#pragma unroll 4
    for (int s = 0; s < args.top_k; ++s) {
      const int slot = args.slots.slot_of[token * args.top_k + s];
      if (slot >= 0) add(slot, args.weights[token * args.top_k + s]);
    }
    if (args.shared) {
      const int slot = routed + static_cast<int>(token);
      const float weight = args.shared_scores == nullptr
                               ? 1.0f
                               : TimesSigmoid(1.0f, args.shared_scores[slot * args.score_stride]);
      add(slot, weight);
    }
    StoreFloat(args.out, args.out_type, token * args.out_stride + column, sum);
  }
}

/// Programmatic dependent launch: every kernel of the experts waits for the one before.
template <typename Arguments>
cudaError_t LaunchChained(void (*kernel)(Arguments), unsigned blocks, Arguments args,
                          cudaStream_t stream) {
  void* parameters[] = {&args};
  const LaunchSize size = {dim3(blocks), kThreads, 0, true};
  return Launch(reinterpret_cast<const void*>(kernel), size, parameters, stream);
}

}  // namespace

cudaError_t PreferShared(const void* function) {
  return cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

cudaError_t LoadExpertKernels() {
  cudaError_t error = LoadSort();
  if (error == cudaSuccess) error = PreferShared(reinterpret_cast<const void*>(&StageRowsKernel));
  if (error == cudaSuccess) error = PreferShared(reinterpret_cast<const void*>(&SumKernel));
  return error;
}

cudaError_t LaunchStageRows(const StageRowsArguments& args, cudaStream_t stream) {
  return LaunchChained(StageRowsKernel, static_cast<unsigned>(args.slots.experts) + 1, args,
                       stream);
}

cudaError_t LaunchSum(const SumArguments& args, cudaStream_t stream) {
  const int64_t count = static_cast<int64_t>(args.tokens) * args.hidden;
  return LaunchChained(SumKernel, ElementwiseBlocks(count, kThreads), args, stream);
}

}  // namespace marlin::cuda
