#include <cuda_runtime_api.h>

#include <memory>

#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/common/launch.h"
#include "backends/cuda/gemm/exact/exact_layout.h"
#include "backends/cuda/plan/kernel_instances.h"
#include "backends/cuda/weights/expanded_tiles.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

/// fp32 GEMMs of fp32 weights and activations, from tiles or canonical arrays.
class ExactGemm final : public CudaGemm {
 public:
  explicit ExactGemm(const PlanRequest& request)
      : CudaGemm(request, {}, ExpandedBytes(request.weights)),
        tiled_(request.weights.traits.tiled),
        rows_(ExactRowsFor(static_cast<int>(request.desc.m))),
        function_(FunctionOf<ExactKernels>({request.weights.kind()}, {tiled_, rows_})) {}

  /// Call it before the first launch, once for each function: other threads may launch it
  /// meanwhile.
  cudaError_t Load() const {
    return cudaFuncSetAttribute(function_, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                ExactSharedBytes(rows_, kMaxExactParts, kMaxExactParts));
  }

 protected:
  Status Launch(const GemmCall& call, cudaStream_t stream) const override {
    const auto& prepared = static_cast<const PreparedTiles&>(*call.weights);
    if (!tiled_) return Check(LaunchFrom(prepared.Canonical(call.expert), call, stream));
    TileView tiles;
    MARLIN_RETURN_IF_ERROR(
        Check(ExpandTiles(prepared, call.expert, call.workspace, stream, &tiles)));
    return Check(LaunchFrom(tiles, call, stream));
  }

 private:
  template <typename View>
  cudaError_t LaunchFrom(const View& weights, const GemmCall& call, cudaStream_t stream) const {
    ExactArguments<View> args;
    args.weights = weights;
    args.a = ActivationsOf(call);
    args.epilogue = EpilogueOf(call);
    args.split = PlanExactParts(weights.k);
    const int outputs = args.epilogue.gated ? weights.n / 2 : weights.n;
    const int row_blocks = Ceil(args.a.m, rows_);
    const int strips = Ceil(outputs, kStripOutputs);
    const int warps = ExactWarpsFor(int64_t{row_blocks} * strips, args.split.parts);
    const bool expanded = workspace_bytes() > 0;
    const LaunchSize size = {dim3(static_cast<unsigned>(row_blocks), static_cast<unsigned>(strips)),
                             warps * 32, ExactSharedBytes(rows_, warps, args.split.parts),
                             call.overlap_previous && !expanded};
    void* parameters[] = {&args};
    return cuda::Launch(function_, size, parameters, stream);
  }

  const bool tiled_;
  const int rows_;
  const void* const function_;
};

}  // namespace

Result<std::shared_ptr<const PlannedGemm>> MakeExact(const PlanRequest& request) {
  auto gemm = std::make_shared<const ExactGemm>(request);
  MARLIN_RETURN_IF_ERROR(request.context.device.errors.Check(gemm->Load(), request.kernel.name));
  return {std::move(gemm)};
}

}  // namespace marlin::cuda
