#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/gemm/toy/toy_kernel.h"

namespace marlin::cuda {
namespace {

__global__ void ToyKernel(EpilogueView epilogue) {
  const int column = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (column < epilogue.n)
    static_cast<float*>(epilogue.out)[blockIdx.y * epilogue.stride + column] = 1;
}

}  // namespace

cudaError_t LaunchToy(const TileGemm& gemm, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((gemm.epilogue.n + 127) / 128),
                  static_cast<unsigned>(gemm.a.m));
  ToyKernel<<<grid, 128, 0, stream>>>(gemm.epilogue);
  return cudaGetLastError();
}

}  // namespace marlin::cuda
