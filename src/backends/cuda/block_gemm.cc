#include "backends/cuda/block_gemm.h"

namespace marlin::cuda {

cudaError_t LaunchBlockGemm(BlockKernel kernel, const TileGemm& gemm, const MarlinW4View& weights,
                            const BlockPlan& plan, cudaStream_t stream) {
  BlockArguments args;
  args.weights = weights;
  args.a = gemm.a.data;
  args.a_stride = gemm.a.stride;
  args.epilogue = gemm.epilogue;
  args.partials = plan.partials ? gemm.partials : nullptr;
  args.m = gemm.a.m;
  args.k = gemm.a.k;
  args.plan = plan;
  // Where every unit begins a run there is nothing to zero.
  if (plan.parallel > 1 && plan.units_of_block > 1) {
    const cudaError_t error = LaunchZeroReduction(args, stream);
    if (error != cudaSuccess) return error;
  }
  const bool fused = kernel == BlockKernel::kFused || kernel == BlockKernel::kMarlinW4;
  const bool extras = UseOf(weights.codes, gemm.kind) == ParameterUse::kAll;
  const void* function = fused ? FusedFunction(kernel, gemm.kind, gemm.bf16, extras)
                               : StagedFunction(kernel, gemm.bf16, extras);
  void* parameters[] = {&args};
  const cudaError_t error = cudaLaunchKernel(function, dim3(static_cast<unsigned>(plan.grid)),
                                             dim3(kBlockThreads), parameters, 0, stream);
  if (error != cudaSuccess || !plan.partials) return error;
  return LaunchReducePartials(gemm.partials, plan.parallel, args.m, args.epilogue, true, stream);
}

}  // namespace marlin::cuda
