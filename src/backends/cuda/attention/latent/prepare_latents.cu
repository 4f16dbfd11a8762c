// Preparation of small batches for latent attention, without a product.
#include "backends/cuda/attention/latent/prepare_latents.cuh"
#include "backends/cuda/common/chain.cuh"

namespace marlin::cuda {
namespace {

__global__ void __launch_bounds__(kPrepareThreads)
    PrepareLatentsKernel(const __grid_constant__ PrepareLatentsArguments args) {
  EnterChain();
  PrepareLatents(args, static_cast<int>(blockIdx.x));
}

}  // namespace

cudaError_t LoadPrepareLatents() { return PrepareKernels(&PrepareLatentsKernel); }

cudaError_t LaunchPrepareLatents(const PrepareLatentsArguments& args, cudaStream_t stream) {
  return LaunchInChain(&PrepareLatentsKernel, dim3(static_cast<unsigned>(PrepareBlocks(args))),
                       kPrepareThreads, 0, stream, args);
}

}  // namespace marlin::cuda
