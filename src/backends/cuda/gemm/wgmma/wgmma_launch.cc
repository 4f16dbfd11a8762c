#include <cuda.h>

#include <memory>
#include <optional>

#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/common/launch.h"
#include "backends/cuda/gemm/wgmma/wgmma_plan.h"
#include "backends/cuda/plan/kernel_instances.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

class WgmmaGemm final : public TilesGemm {
 public:
  WgmmaGemm(const PlanRequest& request, const TileProblem& problem, const WgmmaShape& shape,
            const WgmmaPlan& plan)
      : TilesGemm(request, {shape.tokens, shape.splits}, SumBytes(problem, plan)),
        plan_(plan),
        function_(FunctionFor(request, plan.tokens)),
        tail_function_(plan.tail ? FunctionFor(request, plan.tail->tokens) : nullptr) {}

  /// Call it before the first launch.
  cudaError_t Load() const {
    const cudaError_t error = AllowAllShared(function_);
    return error != cudaSuccess || !plan_.tail ? error : AllowAllShared(tail_function_);
  }

 protected:
  Status LaunchTiles(const GemmCall& call, const TileGemm& gemm,
                     cudaStream_t stream) const override {
    WgmmaArguments args = plan_.arguments;
    bool overlap_previous = gemm.overlap_previous;
    const bool streams = args.streamed > 0;
    const SplitKScratch::Lease scratch =
        streams ? context().scratch.Lend(stream, call.workspace, StreamCounterBytes(plan_))
                : SplitKScratch::Lease();
    if (streams) {
      args.parts = gemm.partials + StreamCounterBytes(plan_) / int64_t{sizeof(float)};
      args.tile_counters = scratch.words();
      if (args.tile_counters == nullptr) {
        // Without scratch the tile counters are initialized here, by a memset before the kernel,
        // which PDL cannot overlap.
        args.tile_counters = reinterpret_cast<uint32_t*>(gemm.partials);
        overlap_previous = false;
        MARLIN_RETURN_IF_ERROR(Check(cudaMemsetAsync(
            args.tile_counters, 0xff, static_cast<size_t>(StreamCounterBytes(plan_)), stream)));
      }
    }
    cudaError_t launched = LaunchItems(gemm, plan_, args, function_, overlap_previous, stream);
    if (launched == cudaSuccess && plan_.tail) {
      launched =
          LaunchItems(gemm, *plan_.tail, plan_.tail->arguments, tail_function_, true, stream);
    }
    if (!plan_.partials) return Check(launched);
    return Check(AddPartials(gemm, PartsOf(plan_), launched, stream));
  }

 private:
  const void* FunctionFor(const PlanRequest& request, int tokens) const {
    const ParameterUse use = UseOf(request.weights.Tiles(0), kind());
    return FunctionOf<WgmmaKernels>(request.weights.tile_kind(), {bf16(), tokens, use});
  }

  cudaError_t LaunchItems(const TileGemm& gemm, const WgmmaLaunch& launch, WgmmaArguments args,
                          const void* function, bool overlap_previous, cudaStream_t stream) const {
    CUtensorMap map;
    const cudaError_t encoded = EncodeMap(
        gemm.a, bf16() ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
        launch.tokens, &map);
    if (encoded != cudaSuccess) return encoded;
    args.weights = gemm.weights;
    args.epilogue = gemm.epilogue;
    args.partials = plan_.partials ? gemm.partials : nullptr;
    args.vector_stores = StoresAsOne(gemm.epilogue, 8);
    void* parameters[] = {&map, &args};
    const auto splits = static_cast<unsigned>(args.splits);
    const LaunchSize size = {dim3(splits, static_cast<unsigned>(launch.groups)), kWgmmaThreads,
                             launch.shared_bytes, overlap_previous,
                             dim3(args.in_cluster ? splits : 1)};
    return cuda::Launch(function, size, parameters, stream);
  }

  const WgmmaPlan plan_;
  const void* const function_;
  const void* const tail_function_;
};

}  // namespace

Result<std::shared_ptr<const PlannedGemm>> MakeWgmma(const PlanRequest& request) {
  const TileProblem problem = TileProblemOf(request.desc);
  const DeviceShape& device = request.context.shape;
  const WgmmaShape shape = request.variant.automatic()
                               ? ChooseWgmmaShape(problem, device)
                               : WgmmaShape{request.variant.width, request.variant.splits};
  auto gemm = std::make_shared<const WgmmaGemm>(request, problem, shape,
                                                PlanWgmmaAs(problem, device, shape));
  MARLIN_RETURN_IF_ERROR(request.context.device.errors.Check(gemm->Load(), request.kernel.name));
  return {std::move(gemm)};
}

}  // namespace marlin::cuda
