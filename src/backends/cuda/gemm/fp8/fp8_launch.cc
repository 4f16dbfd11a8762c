#include <cuda.h>

#include <cmath>
#include <memory>

#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/common/launch.h"
#include "backends/cuda/gemm/fp8/fp8_plan.h"
#include "backends/cuda/gemm/fp8/fp8_quantize.h"
#include "backends/cuda/plan/kernel_instances.h"
#include "backends/cuda/weights/expanded_tiles.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

int64_t QuantizedBytes(const GemmDesc& desc) {
  return RoundUp(desc.m * QuantizedColumns(static_cast<int>(desc.k)), kWorkspaceAlignment);
}

int64_t RowScaleBytes(const GemmDesc& desc) {
  return RoundUp(desc.m * int64_t{sizeof(float)}, kWorkspaceAlignment);
}

/// Quantizes the activations into the workspace, row by row, and multiplies them by dense tiles.
class Fp8Gemm final : public CudaGemm {
 public:
  Fp8Gemm(const PlanRequest& request, const Fp8Plan& plan)
      : CudaGemm(request, {}, WorkspaceBytes(request, plan)),
        plan_(plan),
        kind_(request.weights.kind()),
        function_(FunctionFor(request, plan.tokens)),
        tail_function_(plan.tail ? FunctionFor(request, plan.tail->tokens) : nullptr) {}

  /// Call it before the first launch.
  cudaError_t Load() const {
    const cudaError_t error = AllowAllShared(function_);
    return error != cudaSuccess || !plan_.tail ? error : AllowAllShared(tail_function_);
  }

 protected:
  Status Launch(const GemmCall& call, cudaStream_t stream) const override {
    const auto& prepared = static_cast<const PreparedTiles&>(*call.weights);
    TileGemm gemm;
    MARLIN_RETURN_IF_ERROR(
        Check(ExpandTiles(prepared, call.expert, call.workspace, stream, &gemm.weights)));
    auto* quantized = static_cast<uint8_t*>(call.workspace) + ExpandedBytes(prepared);
    auto* row_scales = reinterpret_cast<float*>(quantized + QuantizedBytes(call.desc));
    gemm.kind = kind_;
    gemm.a = ActivationsOf(call);
    const int columns = QuantizedColumns(gemm.a.k);
    MARLIN_RETURN_IF_ERROR(
        Check(LaunchQuantizeRows(gemm.a, quantized, columns, row_scales, stream)));
    gemm.a.data = quantized;
    gemm.a.stride = gemm.a.k = columns;
    gemm.epilogue = EpilogueOf(call);
    gemm.epilogue.multiplier = gemm.weights.multiplier * std::ldexp(1.0F, kFp8Shift);
    gemm.partials = row_scales + RowScaleBytes(call.desc) / int64_t{sizeof(float)};
    cudaError_t launched = LaunchItems(gemm, row_scales, plan_, function_, stream);
    if (launched == cudaSuccess && plan_.tail) {
      launched = LaunchItems(gemm, row_scales, *plan_.tail, tail_function_, stream);
    }
    if (!plan_.partials) return Check(launched);
    return Check(AddPartials(gemm, 1, launched, stream));
  }

 private:
  static int64_t WorkspaceBytes(const PlanRequest& request, const Fp8Plan& plan) {
    const GemmDesc& desc = request.desc;
    return ExpandedBytes(request.weights) + QuantizedBytes(desc) + RowScaleBytes(desc) +
           (plan.partials ? PartialBytes(Fp8ProblemOf(desc), 1) : 0);
  }
  static const void* FunctionFor(const PlanRequest& request, int tokens) {
    const bool one_group = request.weights.Tiles(0).groups_per_tile == 1;
    return FunctionOf<Fp8Kernels>({request.weights.kind()}, {tokens, one_group});
  }

  cudaError_t LaunchItems(const TileGemm& gemm, const float* row_scales, const Fp8Launch& launch,
                          const void* function, cudaStream_t stream) const {
    CUtensorMap map;
    const cudaError_t encoded =
        EncodeMap(gemm.a, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, launch.tokens, &map);
    if (encoded != cudaSuccess) return encoded;
    Fp8Arguments args = launch.arguments;
    args.row_scales = row_scales;
    args.product.weights = gemm.weights;
    args.product.epilogue = gemm.epilogue;
    args.product.partials = plan_.partials ? gemm.partials : nullptr;
    args.product.vector_stores = StoresAsOne(gemm.epilogue, 8);
    void* parameters[] = {&map, &args};
    // PDL: copies of weights begin while the previous launch ends, which quantizes rows or computes
    // the whole waves.
    const LaunchSize size = {dim3(1, static_cast<unsigned>(launch.groups)), kWgmmaThreads,
                             launch.shared_bytes, true};
    return cuda::Launch(function, size, parameters, stream);
  }

  const Fp8Plan plan_;
  const CodeKind kind_;
  const void* const function_;
  const void* const tail_function_;
};

}  // namespace

Result<std::shared_ptr<const PlannedGemm>> MakeFp8(const PlanRequest& request) {
  auto gemm = std::make_shared<const Fp8Gemm>(
      request, PlanFp8(Fp8ProblemOf(request.desc), request.context.shape));
  MARLIN_RETURN_IF_ERROR(request.context.device.errors.Check(gemm->Load(), request.kernel.name));
  return {std::move(gemm)};
}

}  // namespace marlin::cuda
