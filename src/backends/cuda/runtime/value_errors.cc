#include "backends/cuda/runtime/value_errors.h"

#include <fmt/format.h>

#include <new>

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

Result<std::unique_ptr<ValueErrors>> ValueErrors::Make(DeviceHandle& device) {
  const DeviceScope scope(device.index);
  void* memory = nullptr;
  MARLIN_RETURN_IF_ERROR(device.errors.Check(
      cudaHostAlloc(&memory, sizeof(ValueRecord), cudaHostAllocMapped | cudaHostAllocPortable),
      "cudaHostAlloc"));
  auto* const record = new (memory) ValueRecord();
  void* on_device = nullptr;
  const Status mapped =
      device.errors.Check(cudaHostGetDevicePointer(&on_device, memory, 0), "cudaHostAlloc");
  std::unique_ptr<ValueErrors> errors(
      new ValueErrors(record, static_cast<ValueRecord*>(on_device)));
  MARLIN_RETURN_IF_ERROR(mapped);
  return errors;
}

ValueErrors::~ValueErrors() { cudaFreeHost(record_); }

Status ValueErrors::Take() {
  const std::lock_guard lock(mutex_);
  // Kernels write behind the compiler's back.
  volatile ValueRecord& record = *record_;
  if (record.router == ValueRecord::kNone && record.bad_selection == 0) return {};
  const unsigned long long router = record.router;
  Status status =
      router != ValueRecord::kNone
          ? RouterError(router)
          : Status(Code::kInvalidArgument,
                   fmt::format("ids: token {}, selection {}: {} is not in 0..{}", int{record.token},
                               int{record.selection}, int{record.id}, record.experts - 1));
  record.router = ValueRecord::kNone;
  record.bad_selection = 0;
  return status;
}

}  // namespace marlin::cuda
