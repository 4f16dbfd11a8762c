#include <cuda_runtime_api.h>

#include <memory>

#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/common/launch.h"
#include "backends/cuda/gemm/mma/mma_plan.h"
#include "backends/cuda/plan/kernel_instances.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

class MmaGemm final : public TilesGemm {
 public:
  MmaGemm(const PlanRequest& request, const TileProblem& problem, const MmaPlan& plan)
      : TilesGemm(request, {plan.tokens, plan.arguments.splits}, MmaWorkspaceBytes(problem, plan)),
        plan_(plan),
        function_(FunctionOf<MmaKernels>(
            request.weights.tile_kind(),
            {bf16(), plan.tokens, UseOf(request.weights.Tiles(0), kind())})) {}

  const void* function() const { return function_; }

 protected:
  Status LaunchTiles(const GemmCall& call, const TileGemm& gemm,
                     cudaStream_t stream) const override {
    MmaArguments args = plan_.arguments;
    args.weights = gemm.weights;
    args.a = gemm.a.data;
    args.a_stride = gemm.a.stride;
    args.epilogue = gemm.epilogue;
    args.partials = plan_.partials ? gemm.partials : nullptr;
    bool overlap_previous = gemm.overlap_previous;
    const bool splits = args.splits > 1 && !plan_.partials;
    const SplitKScratch::Lease scratch =
        splits ? context().scratch.Lend(stream, call.workspace, MmaCounterBytes(plan_))
               : SplitKScratch::Lease();
    if (splits) {
      args.parts = gemm.partials + MmaCounterBytes(plan_) / int64_t{sizeof(float)};
      args.tile_counters = scratch.words();
      if (args.tile_counters == nullptr) {
        // Without scratch the tile counters are initialized here, by a memset before the kernel,
        // which PDL cannot overlap.
        args.tile_counters = reinterpret_cast<uint32_t*>(gemm.partials);
        overlap_previous = false;
        MARLIN_RETURN_IF_ERROR(Check(cudaMemsetAsync(
            args.tile_counters, 0xff, static_cast<size_t>(MmaCounterBytes(plan_)), stream)));
      }
    }
    const LaunchSize size = {
        dim3(static_cast<unsigned>(plan_.items), static_cast<unsigned>(args.splits)),
        plan_.warps * 32, plan_.shared_bytes, overlap_previous};
    void* parameters[] = {&args};
    const cudaError_t launched = cuda::Launch(function_, size, parameters, stream);
    if (!plan_.partials) return Check(launched);
    return Check(AddPartials(gemm, args.splits, launched, stream));
  }

 private:
  const MmaPlan plan_;
  const void* const function_;
};

}  // namespace

Result<std::shared_ptr<const PlannedGemm>> MakeMma(const PlanRequest& request) {
  const TileProblem problem = TileProblemOf(request.desc);
  const DeviceShape& device = request.context.shape;
  const MmaPlan plan =
      request.variant.automatic()
          ? PlanMma(problem, device)
          : PlanMmaAs(problem, device, {request.variant.width, request.variant.splits});
  auto gemm = std::make_shared<const MmaGemm>(request, problem, plan);
  for (const cudaError_t error : {AllowAllShared(gemm->function()), PreferShared(gemm->function())})
    MARLIN_RETURN_IF_ERROR(request.context.device.errors.Check(error, request.kernel.name));
  return {std::move(gemm)};
}

}  // namespace marlin::cuda
