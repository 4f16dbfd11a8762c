#include "backends/cuda/cublas_product.h"

#include <algorithm>

#include "backends/cuda/tile_layout.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

/// Of what cuBLAS takes as a workspace; a caller's may be aligned to less.
constexpr int64_t kAlignment = 256;

uint8_t* Aligned(uint8_t* at) {
  const uintptr_t past = reinterpret_cast<uintptr_t>(at) % static_cast<uintptr_t>(kAlignment);
  return past == 0 ? at : at + (static_cast<uintptr_t>(kAlignment) - past);
}

/// Whether cuBLAS can finish the product itself: nothing but a factor and one rounding, into rows
/// that its stores reach.
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

}  // namespace

CublasWorkspace CublasWorkspace::Of(const GemmDesc& desc) {
  const int64_t rows =
      RoundUp(desc.n, int64_t{kBlockOutputs}) * RoundUp(desc.k, int64_t{kTileK}) * 2;
  CublasWorkspace workspace;
  workspace.sums = RoundUp(rows, kAlignment);
  workspace.own = workspace.sums + RoundUp(desc.m * desc.n * 4, kAlignment);
  workspace.bytes = workspace.own + kCublasWorkspaceBytes + kAlignment;
  return workspace;
}

Result<std::shared_ptr<const Cublas>> CublasGemm::Handle() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (handle_ == nullptr) {
    MARLIN_ASSIGN_OR_RETURN(handle_, Cublas::Make(/*exact_sums=*/true));
  }
  return handle_;
}

Status CublasGemm::Run(const TileGemm& gemm, const GemmCall& call, uint8_t* workspace,
                       ErrorLatch& errors) const {
  MARLIN_ASSIGN_OR_RETURN(const std::shared_ptr<const Cublas> handle, Handle());
  const CublasWorkspace parts = CublasWorkspace::Of(call.desc);
  auto* const stream = static_cast<cudaStream_t>(call.stream);
  MARLIN_RETURN_IF_ERROR(errors.Check(
      LaunchDenseRows(gemm.weights, gemm.kind, gemm.bf16, workspace, stream), "dense rows"));
  const bool plain = IsPlain(gemm, gemm.epilogue);
  CublasProduct product;
  product.m = call.desc.m;
  product.n = call.desc.n;
  product.k = call.desc.k;
  product.a = gemm.a.data;
  product.a_stride = std::max(gemm.a.stride, product.k);  // Of one row it may be anything.
  product.b = workspace;
  product.b_stride = RoundUp(product.k, int64_t{kTileK});
  product.c = plain ? gemm.epilogue.out : workspace + parts.sums;
  product.c_stride = plain ? std::max(gemm.epilogue.stride, product.n) : product.n;
  product.factor = plain ? gemm.epilogue.multiplier : 1.0F;
  product.bf16 = gemm.bf16;
  product.f32_output = !plain || gemm.epilogue.type == Element::kF32;
  MARLIN_RETURN_IF_ERROR(handle->Launch(product, Aligned(workspace + parts.own), stream));
  if (plain) return Status();
  return errors.Check(LaunchReducePartials(reinterpret_cast<const float*>(workspace + parts.sums),
                                           1, gemm.a.m, gemm.epilogue, false, stream),
                      "epilogue");
}

}  // namespace marlin::cuda
