#include "backends/cuda/gemm/gemv/gemv_launch.h"

#include <cuda_runtime_api.h>

#include <memory>

#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/common/launch.h"
#include "backends/cuda/gemm/gemv/gemv_plan.h"
#include "backends/cuda/plan/kernel_instances.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

/// Whether the epilogue is at most a bias, and four 16-bit outputs are one aligned vectorized
/// store.
bool StoresPlainQuads(const EpilogueView& view) {
  return view.type != Element::kF32 && view.activation == 0 && !view.gated &&
         view.row_weight == nullptr && StoresAsOne(view, 4);
}

class GemvGemm final : public TilesGemm {
 public:
  GemvGemm(const PlanRequest& request, const GemvPlan& plan, int64_t partial_bytes)
      : TilesGemm(request, {}, partial_bytes),
        plan_(plan),
        function_(FunctionOf<GemvKernels>(request.weights.tile_kind(), VariantOf(request, plan))) {}

  const void* function() const { return function_; }

 protected:
  Status LaunchTiles(const GemmCall& call, const TileGemm& gemm,
                     cudaStream_t stream) const override {
    GemvArguments args = plan_.arguments;
    args.weights = gemm.weights;
    args.a = gemm.a.data;
    args.a_stride = gemm.a.stride;
    args.epilogue = gemm.epilogue;
    args.partials = plan_.partials ? gemm.partials : nullptr;
    args.plain_quads = StoresPlainQuads(gemm.epilogue);
    const SplitKScratch::Lease scratch =
        plan_.in_memory ? context().scratch.Lend(stream, call.workspace, SplitWorkspaceBytes(plan_))
                        : SplitKScratch::Lease();
    if (scratch.words() != nullptr) {
      args.tile_counters = scratch.words();
      args.exchange = reinterpret_cast<float*>(scratch.words() + CounterWords(plan_));
    }
    const LaunchSize size = {
        dim3(static_cast<unsigned>(plan_.splits), static_cast<unsigned>(plan_.groups)),
        plan_.warps * 32, plan_.shared_bytes, gemm.overlap_previous,
        dim3(args.in_cluster ? static_cast<unsigned>(plan_.splits) : 1,
             static_cast<unsigned>(args.multicast))};
    void* parameters[] = {&args};
    const cudaError_t launched = cuda::Launch(function_, size, parameters, stream);
    if (!plan_.partials || args.tile_counters != nullptr) return Check(launched);
    return Check(AddPartials(gemm, plan_.splits, launched, stream));
  }

 private:
  GemvKernels::Variant VariantOf(const PlanRequest& request, const GemvPlan& plan) const {
    return {bf16(), UseOf(request.weights.Tiles(0), kind()), plan.strips,
            Ceil(plan.arguments.m, kOctet)};
  }

  const GemvPlan plan_;
  const void* const function_;
};

}  // namespace

int CountClusters(int blocks, const DeviceShape& device) {
  // The kernels of all kinds of codes have the same threads and may have the same shared memory.
  const void* function = nullptr;
  for (int kind = 0; function == nullptr && kind <= static_cast<int>(CodeKind::kDense16); ++kind) {
    function = FunctionOf<GemvKernels>({static_cast<CodeKind>(kind)},
                                       {true, ParameterUse::kOneScale, 1, 1});
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kMostGemvWarps * 32);
  config.dynamicSmemBytes = static_cast<size_t>(device.shared_bytes);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  if (AllowAllShared(function) != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&clusters, function, &config) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return clusters;
}

Result<std::shared_ptr<const PlannedGemm>> MakeGemv(const PlanRequest& request) {
  const TileProblem problem = TileProblemOf(request.desc);
  const GemvPlan plan = PlanGemv(problem, request.context.shape);
  auto gemm = std::make_shared<const GemvGemm>(
      request, plan, plan.partials ? PartialBytes(problem, plan.splits) : 0);
  MARLIN_RETURN_IF_ERROR(
      request.context.device.errors.Check(AllowAllShared(gemm->function()), request.kernel.name));
  return {std::move(gemm)};
}

}  // namespace marlin::cuda
