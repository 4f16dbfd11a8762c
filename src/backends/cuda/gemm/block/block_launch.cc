#include "backends/cuda/gemm/block/block_launch.h"

#include <memory>

#include "backends/cuda/common/cuda_gemm.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

class BlockGemm final : public TilesGemm {
 public:
  BlockGemm(const PlanRequest& request, BlockKernel kernel, const BlockPlan& plan)
      : TilesGemm(request, {},
                  plan.partials ? PartialBytes(TileProblemOf(request.desc), plan.parallel) : 0),
        kernel_(kernel),
        plan_(plan) {}

 protected:
  Status LaunchTiles(const GemmCall& call, const TileGemm& gemm,
                     cudaStream_t stream) const override {
    const auto& prepared = static_cast<const PreparedTiles&>(*call.weights);
    BlockArguments args;
    if (prepared.traits.marlin_w4) args.weights = prepared.MarlinW4(call.expert);
    args.weights.codes = gemm.weights;
    args.a = gemm.a.data;
    args.a_stride = gemm.a.stride;
    args.epilogue = gemm.epilogue;
    args.partials = plan_.partials ? gemm.partials : nullptr;
    args.m = gemm.a.m;
    args.k = gemm.a.k;
    args.plan = plan_;
    // With one unit per CTA, every unit begins a run and there is nothing to zero.
    if (plan_.parallel > 1 && plan_.units_of_block > 1) {
      MARLIN_RETURN_IF_ERROR(Check(LaunchZeroReduction(args, stream)));
    }
    const bool fused = kernel_ == BlockKernel::kFused || kernel_ == BlockKernel::kMarlinW4;
    const bool extras = UseOf(args.weights.codes, kind()) == ParameterUse::kAll;
    const void* const function = fused ? FusedFunction(kernel_, kind(), bf16(), extras)
                                       : StagedFunction(kernel_, bf16(), extras);
    void* parameters[] = {&args};
    const cudaError_t launched = cudaLaunchKernel(function, dim3(static_cast<unsigned>(plan_.grid)),
                                                  dim3(kBlockThreads), parameters, 0, stream);
    if (!plan_.partials) return Check(launched);
    return Check(AddPartials(gemm, plan_.parallel, launched, stream));
  }

 private:
  const BlockKernel kernel_;
  const BlockPlan plan_;
};

}  // namespace

Result<std::shared_ptr<const PlannedGemm>> MakeBlock(const PlanRequest& request) {
  // Every row of the family has a kernel.
  const BlockKernel kernel = *BlockKernelOf(request.kernel.name);
  const BlockPlan plan = PlanBlocks(kernel, TileProblemOf(request.desc), request.context.shape);
  return {std::make_shared<const BlockGemm>(request, kernel, plan)};
}

}  // namespace marlin::cuda
