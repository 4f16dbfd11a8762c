// The row marlin_gemm_cublas: expands weights to dense rows in the workspace, runs cuBLAS's GEMM,
// then the epilogue.
//
//   W^T[n, k] (16 bits) <- tiles     C[m, n] = factor x A x W     where that is the whole epilogue
//                                    sums[m, n] (fp32) = A x W, then the reduction kernel,
//                                    elsewhere
//
// Weights are rounded as in the other kernels with tiled weights; sums are fp32 throughout.
// cuBLAS's heuristics select one algorithm for each problem, with a workspace of fixed size.
#include "backends/cuda/gemm/cublas/cublas_launch.h"

#include <algorithm>
#include <utility>

#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/gemm/cublas/cublas_plan.h"
#include "backends/cuda/layout/tile_layout.h"
#include "backends/cuda/weights/weights_launch.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

uint8_t* Aligned(uint8_t* at) {
  const uintptr_t past = reinterpret_cast<uintptr_t>(at) % static_cast<uintptr_t>(kCublasAlignment);
  return past == 0 ? at : at + (static_cast<uintptr_t>(kCublasAlignment) - past);
}

/// Whether cuBLAS can apply the epilogue itself: only a factor and one rounding, into rows aligned
/// for its stores.
bool IsPlain(const TileGemm& gemm, const EpilogueView& epilogue) {
  if (epilogue.bias != nullptr || epilogue.activation != 0 || epilogue.gated ||
      epilogue.row_weight != nullptr) {
    return false;
  }
  const Element operand = gemm.bf16 ? Element::kBf16 : Element::kF16;
  if (epilogue.type != operand && epilogue.type != Element::kF32) return false;
  constexpr uintptr_t kStoreBytes = 16;
  const int64_t row = epilogue.stride * (epilogue.type == Element::kF32 ? 4 : 2);
  return reinterpret_cast<uintptr_t>(epilogue.out) % kStoreBytes == 0 &&
         row % static_cast<int64_t>(kStoreBytes) == 0;
}

class CublasGemm final : public TilesGemm {
 public:
  CublasGemm(const PlanRequest& request, std::shared_ptr<const Cublas> handle)
      : TilesGemm(request, {}, CublasWorkspace::Of(request.desc).bytes),
        handle_(std::move(handle)) {}

 protected:
  Status LaunchTiles(const GemmCall& call, const TileGemm& gemm,
                     cudaStream_t stream) const override {
    const CublasWorkspace parts = CublasWorkspace::Of(call.desc);
    auto* const workspace = reinterpret_cast<uint8_t*>(gemm.partials);
    MARLIN_RETURN_IF_ERROR(
        Check(LaunchDenseRows(gemm.weights, gemm.kind, gemm.bf16, workspace, stream)));
    const bool plain = IsPlain(gemm, gemm.epilogue);
    CublasProduct product;
    product.m = call.desc.m;
    product.n = call.desc.n;
    product.k = call.desc.k;
    product.a = gemm.a.data;
    product.a_stride = std::max(gemm.a.stride, product.k);  // With one row it may be anything.
    product.b = workspace;
    product.b_stride = RoundUp(product.k, int64_t{kTileK});
    product.c = plain ? gemm.epilogue.out : workspace + parts.sums;
    product.c_stride = plain ? std::max(gemm.epilogue.stride, product.n) : product.n;
    product.factor = plain ? gemm.epilogue.multiplier : 1.0F;
    product.bf16 = gemm.bf16;
    product.f32_output = !plain || gemm.epilogue.type == Element::kF32;
    MARLIN_RETURN_IF_ERROR(handle_->Launch(product, Aligned(workspace + parts.own), stream));
    if (plain) return Status();
    return Check(LaunchReducePartials(reinterpret_cast<const float*>(workspace + parts.sums), 1,
                                      gemm.a.m, gemm.epilogue, false, stream));
  }

 private:
  const std::shared_ptr<const Cublas> handle_;
};

}  // namespace

Result<std::shared_ptr<const Cublas>> CublasHandle::Get() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (handle_ == nullptr) {
    MARLIN_ASSIGN_OR_RETURN(handle_, Cublas::Make(/*exact_sums=*/true));
  }
  return handle_;
}

Result<std::shared_ptr<const PlannedGemm>> MakeCublas(const PlanRequest& request) {
  MARLIN_ASSIGN_OR_RETURN(std::shared_ptr<const Cublas> handle, request.context.cublas.Get());
  return {std::make_shared<const CublasGemm>(request, std::move(handle))};
}

}  // namespace marlin::cuda
