#include <cuda_runtime_api.h>

#include <memory>

#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/gemm/exact/exact_functions.h"
#include "backends/cuda/gemm/exact/exact_layout.h"
#include "backends/cuda/layout/code_kind.h"
#include "backends/cuda/weights/weights_launch.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

const void* ExactFunctionOf(CodeKind kind, bool tiled, int rows) {
  switch (kind) {
#define MARLIN_KIND(name)                                                                     \
  case CodeKind::name:                                                                        \
    if constexpr (IsBuilt(CodeKind::name)) return ExactFunction<CodeKind::name>(tiled, rows); \
    break;
#include "backends/cuda/layout/code_kinds.def"
#undef MARLIN_KIND
  }
  return nullptr;
}

/// The dense tiles of sparse weights in the workspace: 3/4 of the memory for every row count, and
/// one more pass over the weights. Bytes of the workspace; 0 for other weights.
int64_t ExpandedBytes(const PreparedTiles& weights) {
  if (!weights.traits.sparse) return 0;
  const TileView view = weights.Expanded(0);
  const int64_t strips = RoundUp(int64_t{view.n}, int64_t{kBlockOutputs}) / kStripOutputs;
  return RoundUp(strips * view.tiles_of_strip * view.tile_bytes, kWorkspaceAlignment);
}

/// Launches the expansion, if the weights are sparse, and returns the view of the tiles to read.
/// The kernel that reads them must not begin before the work before it has ended (PDL).
cudaError_t ExpandTiles(const PreparedTiles& weights, int64_t expert, void* workspace,
                        cudaStream_t stream, TileView* tiles) {
  *tiles = weights.Tiles(expert);
  if (!weights.traits.sparse) return cudaSuccess;
  const TileView sparse = *tiles;
  *tiles = weights.Expanded(expert);
  auto* const to = static_cast<uint8_t*>(workspace);
  tiles->tiles = to;
  if (sparse.tiles_of_strip == 0) return cudaSuccess;
  return LaunchExpandSparse(sparse, *tiles, weights.kind(), weights.zero_code(), to, stream);
}

/// fp32 GEMMs of fp32 weights and activations, from tiles or canonical arrays.
class ExactGemm final : public CudaGemm {
 public:
  explicit ExactGemm(const PlanRequest& request)
      : CudaGemm(request, {}, ExpandedBytes(request.weights)),
        tiled_(request.weights.traits.tiled),
        rows_(ExactRowsFor(static_cast<int>(request.desc.m))),
        function_(ExactFunctionOf(request.weights.kind(), tiled_, rows_)) {}

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
    const int row_blocks = (args.a.m + rows_ - 1) / rows_;
    const int strips = (outputs + kStripOutputs - 1) / kStripOutputs;
    const int warps = ExactWarpsFor(int64_t{row_blocks} * strips, args.split.parts);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(row_blocks), static_cast<unsigned>(strips));
    config.blockDim = dim3(static_cast<unsigned>(warps * 32));
    config.dynamicSmemBytes = static_cast<size_t>(ExactSharedBytes(rows_, warps, args.split.parts));
    config.stream = stream;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    const bool expanded = workspace_bytes() > 0;
    config.numAttrs = call.overlap_previous && !expanded ? 1 : 0;
    void* parameters[] = {&args};
    return cudaLaunchKernelExC(&config, function_, parameters);
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
