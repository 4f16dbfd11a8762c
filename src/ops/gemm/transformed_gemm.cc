#include "ops/gemm/transformed_gemm.h"

#include <utility>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"
#include "plan/gemm/transform_columns.h"

namespace marlin {
namespace {

/// Bytes from one transformed row to the next: kernels copy whole vectors of rows.
int64_t RowBytes(const GemmDesc& desc) {
  return RoundUp(desc.k * DTypeBytes(desc.a_type), kBufferAlignment);
}

int64_t RowsBytes(const GemmDesc& desc) { return SaturatingProduct(desc.m, RowBytes(desc)); }

int64_t WorkspaceBytes(const GemmDesc& desc, const PlannedGemm& planned) {
  const int64_t rows = RowsBytes(desc);
  const int64_t inner = planned.workspace_bytes();
  return rows > INT64_MAX - inner ? INT64_MAX : rows + inner;
}

class TransformedGemm final : public PlannedGemm {
 public:
  TransformedGemm(const Backend& backend, const GemmDesc& desc,
                  std::shared_ptr<const PlannedGemm> planned)
      : PlannedGemm(planned->kernel(), planned->variant(), WorkspaceBytes(desc, *planned)),
        backend_(backend),
        planned_(std::move(planned)) {}

  Status Run(const GemmCall& call) const override {
    const GemmDesc& desc = call.desc;
    const int64_t stride = RowBytes(desc) / DTypeBytes(desc.a_type);
    TransformColumnsCall transform;
    transform.from = TensorView(call.a, desc.a_type, {desc.m, desc.k}, {call.a_stride, 1});
    transform.to = MutableTensorView(call.workspace, desc.a_type, {desc.m, desc.k}, {stride, 1});
    transform.transform = InputOf(*call.weights, call.expert);
    MARLIN_RETURN_IF_ERROR(backend_.TransformColumns(transform, call.stream));
    GemmCall inner = call;
    inner.a = call.workspace;
    inner.a_stride = stride;
    inner.workspace = static_cast<std::byte*>(call.workspace) + RowsBytes(desc);
    return planned_->Run(inner);
  }

 private:
  const Backend& backend_;
  const std::shared_ptr<const PlannedGemm> planned_;
};

/// A copy of an array in device memory; null for an empty one.
template <typename T>
Result<std::shared_ptr<const T>> CopyToDevice(const Backend& backend, const TensorView& array) {
  if (array.empty() || array.ElementCount() == 0) return std::shared_ptr<const T>();
  MARLIN_ASSIGN_OR_RETURN(void* const memory, backend.Allocate(array.ByteCount()));
  std::shared_ptr<const T> copy(static_cast<const T*>(memory),
                                [&backend](const T* data) { backend.Free(const_cast<T*>(data)); });
  MARLIN_RETURN_IF_ERROR(backend.CopyToDevice(memory, array.data(), array.ByteCount()));
  return copy;
}

}  // namespace

Status AttachInput(const Backend& backend, const InputArrays& arrays,
                   const PreparedWeights::Storage& weights) {
  MARLIN_ASSIGN_OR_RETURN(weights.input.permutation,
                          CopyToDevice<int32_t>(backend, arrays.permutation));
  MARLIN_ASSIGN_OR_RETURN(weights.input.scale, CopyToDevice<float>(backend, arrays.scale));
  return {};
}

InputTransform InputOf(const PreparedWeights::Storage& weights, int64_t expert) {
  const WeightsSpec& spec = weights.spec;
  InputTransform transform;
  transform.hadamard = spec.input_hadamard;
  if (weights.input.scale != nullptr) transform.scale = weights.input.scale.get() + expert * spec.k;
  if (weights.input.permutation != nullptr) {
    transform.permutation = weights.input.permutation.get() + expert * spec.k;
  }
  return transform;
}

std::shared_ptr<const PlannedGemm> TransformFirst(const Backend& backend, const GemmDesc& desc,
                                                  std::shared_ptr<const PlannedGemm> planned) {
  return std::make_shared<const TransformedGemm>(backend, desc, std::move(planned));
}

}  // namespace marlin
