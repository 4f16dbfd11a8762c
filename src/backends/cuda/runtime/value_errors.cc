#include "backends/cuda/runtime/value_errors.h"

#include <fmt/format.h>

#include "base/macros.h"

namespace marlin::cuda {
namespace {

Status RouterError(unsigned long long key) {
  const auto error = static_cast<LogitError>(key & 3);
  const auto expert = static_cast<int64_t>(key >> 2 & 0x7fffffffULL);
  const int64_t token = static_cast<int64_t>(key >> 33) - 1;
  switch (error) {
    case LogitError::kNaNBias:
      return Status(Code::kInvalidArgument, fmt::format("choice_bias: NaN at {}", expert));
    case LogitError::kNoFinite:
      return Status(Code::kInvalidArgument,
                    fmt::format("logits: expected a finite one per token, got -Inf for all {} "
                                "experts of token {}",
                                expert, token));
    default:
      return Status(Code::kInvalidArgument,
                    fmt::format("logits: {} at [{}, {}] (token, expert)",
                                error == LogitError::kNaN ? "NaN" : "Inf", token, expert));
  }
}

}  // namespace

Result<std::unique_ptr<ValueErrors>> ValueErrors::Make(
    const std::shared_ptr<DeviceHandle>& device) {
  const DeviceScope scope(device->index);
  MARLIN_ASSIGN_OR_RETURN(DeviceMemory record, DeviceMemory::Allocate(device, sizeof(ValueRecord)));
  std::unique_ptr<ValueErrors> errors(new ValueErrors(device, std::move(record)));
  void* any = nullptr;
  MARLIN_RETURN_IF_ERROR(device->errors.Check(
      cudaHostAlloc(&any, sizeof(int), cudaHostAllocMapped | cudaHostAllocPortable),
      "cudaHostAlloc"));
  errors->any_ = static_cast<int*>(any);
  void* on_device = nullptr;
  MARLIN_RETURN_IF_ERROR(
      device->errors.Check(cudaHostGetDevicePointer(&on_device, any, 0), "cudaHostAlloc"));
  errors->view_ = {reinterpret_cast<ValueRecord*>(errors->record_.data()),
                   static_cast<int*>(on_device)};
  MARLIN_RETURN_IF_ERROR(errors->Reset());
  return errors;
}

ValueErrors::~ValueErrors() { cudaFreeHost(const_cast<int*>(any_)); }

Status ValueErrors::Reset() {
  *any_ = 0;
  const ValueRecord empty;
  MARLIN_RETURN_IF_ERROR(device_->errors.Check(
      cudaMemcpy(record_.data(), &empty, sizeof(empty), cudaMemcpyHostToDevice), "cudaMemcpy"));
  // The copy from pageable memory may return before it is done.
  return device_->errors.Check(cudaStreamSynchronize(nullptr), "cudaMemcpy");
}

Status ValueErrors::Take() {
  const std::lock_guard lock(mutex_);
  if (*any_ == 0) return {};
  ValueRecord record;
  MARLIN_RETURN_IF_ERROR(device_->errors.Check(
      cudaMemcpy(&record, record_.data(), sizeof(record), cudaMemcpyDeviceToHost), "cudaMemcpy"));
  MARLIN_RETURN_IF_ERROR(Reset());
  if (record.router != ValueRecord::kNone) return RouterError(record.router);
  return Status(Code::kInvalidArgument,
                fmt::format("ids: token {}, selection {}: {} is not in 0..{}", record.token,
                            record.selection, record.id, record.experts - 1));
}

}  // namespace marlin::cuda
