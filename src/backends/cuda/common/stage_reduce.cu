// Kernels that run before and after the GEMMs with tiled weights: staging of activations in the
// layout that async copies need, and the split-K reduction with the epilogue.
#include <algorithm>

#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/common/tile_gemm.h"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    StageActivationsKernel(ActivationView a, uint32_t* out, int pairs_padded) {
  EnterChain();
  const int64_t count = static_cast<int64_t>(a.m) * pairs_padded;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += step) {
    const int64_t m = i / pairs_padded;
    const int k = static_cast<int>(i % pairs_padded) * 2;
    const float low = k < a.k ? LoadFloat(a.data, a.type, m * a.stride + k) : 0.0f;
    const float high = k + 1 < a.k ? LoadFloat(a.data, a.type, m * a.stride + k + 1) : 0.0f;
    out[i] = T::Pack(low, high);
  }
}

MARLIN_DEVICE float SumOfParts(const float* partials, int splits, int64_t stride, int64_t i) {
  float sum = __ldcg(partials + i);
  for (int s = 1; s < splits; ++s) sum += __ldcg(partials + s * stride + i);
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    ReducePartialsKernel(const float* partials, int splits, int m, EpilogueView epilogue) {
  EnterChain();
  const int columns = epilogue.gated ? epilogue.n / 2 : epilogue.n;
  const int64_t count = static_cast<int64_t>(m) * columns;
  const int64_t stride = static_cast<int64_t>(m) * epilogue.n;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += step) {
    const int row = static_cast<int>(i / columns);
    const int n = static_cast<int>(i % columns);
    const int64_t at = static_cast<int64_t>(row) * epilogue.n + n;
    const float sum = SumOfParts(partials, splits, stride, at);
    if (epilogue.gated) {
      FinishGated(epilogue, row, n, sum, SumOfParts(partials, splits, stride, at + columns));
    } else {
      Finish(epilogue, row, n, sum);
    }
  }
}

unsigned BlocksFor(int64_t count) {
  constexpr int64_t kMaxBlocks = 132 * 16;
  return static_cast<unsigned>(
      std::clamp<int64_t>((count + kThreads - 1) / kThreads, 1, kMaxBlocks));
}

}  // namespace

cudaError_t LaunchStageActivations(const ActivationView& a, void* out, int k_padded, bool bf16,
                                   cudaStream_t stream) {
  const int pairs = k_padded / 2;
  const unsigned blocks = BlocksFor(static_cast<int64_t>(a.m) * pairs);
  auto* to = static_cast<uint32_t*>(out);
  const auto kernel = bf16 ? &StageActivationsKernel<Bf16x2> : &StageActivationsKernel<F16x2>;
  return LaunchInChain(kernel, dim3(blocks), kThreads, 0, stream, a, to, pairs);
}

cudaError_t LaunchReducePartials(const float* partials, int splits, int m,
                                 const EpilogueView& epilogue, bool chained, cudaStream_t stream) {
  const int columns = epilogue.gated ? epilogue.n / 2 : epilogue.n;
  const dim3 blocks(BlocksFor(static_cast<int64_t>(m) * columns));
  EpilogueView view = epilogue;
  void* parameters[] = {&partials, &splits, &m, &view};
  const LaunchSize size = {blocks, kThreads, 0, chained};
  return Launch(reinterpret_cast<const void*>(&ReducePartialsKernel), size, parameters, stream);
}

}  // namespace marlin::cuda
