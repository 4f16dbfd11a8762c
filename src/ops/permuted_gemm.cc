#include "ops/permuted_gemm.h"

#include <utility>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"
#include "plan/permute_columns.h"

namespace marlin {
namespace {

/// Bytes from one gathered row to the next: kernels copy whole vectors of rows.
int64_t RowBytes(const GemmDesc& desc) {
  return RoundUp(desc.k * DTypeBytes(desc.a_type), kBufferAlignment);
}

int64_t RowsBytes(const GemmDesc& desc) { return SaturatingProduct(desc.m, RowBytes(desc)); }

int64_t WorkspaceBytes(const GemmDesc& desc, const PlannedGemm& planned) {
  const int64_t rows = RowsBytes(desc);
  const int64_t inner = planned.workspace_bytes();
  return rows > INT64_MAX - inner ? INT64_MAX : rows + inner;
}

class PermutedGemm final : public PlannedGemm {
 public:
  PermutedGemm(const Backend& backend, const GemmDesc& desc,
               std::shared_ptr<const PlannedGemm> planned)
      : PlannedGemm(planned->kernel(), planned->variant(), WorkspaceBytes(desc, *planned)),
        backend_(backend),
        planned_(std::move(planned)) {}

  Status Run(const GemmCall& call) const override {
    const GemmDesc& desc = call.desc;
    const int64_t stride = RowBytes(desc) / DTypeBytes(desc.a_type);
    PermuteColumnsCall gather;
    gather.from = TensorView(call.a, desc.a_type, {desc.m, desc.k}, {call.a_stride, 1});
    gather.to = MutableTensorView(call.workspace, desc.a_type, {desc.m, desc.k}, {stride, 1});
    gather.permutation = PermutationOf(*call.weights, call.expert);
    MARLIN_RETURN_IF_ERROR(backend_.PermuteColumns(gather, call.stream));
    GemmCall sorted = call;
    sorted.a = call.workspace;
    sorted.a_stride = stride;
    sorted.workspace = static_cast<std::byte*>(call.workspace) + RowsBytes(desc);
    return planned_->Run(sorted);
  }

 private:
  const Backend& backend_;
  const std::shared_ptr<const PlannedGemm> planned_;
};

}  // namespace

Status AttachPermutation(const Backend& backend, const TensorView& permutation,
                         const PreparedWeights::Storage& weights) {
  if (permutation.ElementCount() == 0) return {};
  MARLIN_ASSIGN_OR_RETURN(void* const memory, backend.Allocate(permutation.ByteCount()));
  weights.permutation = std::shared_ptr<const int32_t>(
      static_cast<const int32_t*>(memory),
      [&backend](const int32_t* data) { backend.Free(const_cast<int32_t*>(data)); });
  return backend.CopyToDevice(memory, permutation.data(), permutation.ByteCount());
}

std::shared_ptr<const PlannedGemm> GatherFirst(const Backend& backend, const GemmDesc& desc,
                                               std::shared_ptr<const PlannedGemm> planned) {
  return std::make_shared<const PermutedGemm>(backend, desc, std::move(planned));
}

}  // namespace marlin
