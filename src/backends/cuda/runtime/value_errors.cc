#include "backends/cuda/runtime/value_errors.h"

#include <fmt/core.h>

#include <string>

#include "base/macros.h"
#include "plan/step/indices.h"
#include "plan/step/router_errors.h"
#include "plan/step/sample_marks.h"

namespace marlin::cuda {
namespace {

Status RouterError(unsigned long long key) {
  const auto error = static_cast<LogitError>(key & 3);
  const auto expert = static_cast<int64_t>(key >> 2 & 0x7fffffffULL);
  const int64_t token = static_cast<int64_t>(key >> 33) - 1;
  switch (error) {
    case LogitError::kNaNBias:
      return NanChoiceBias(expert);
    case LogitError::kNoFinite:
      return NoFiniteLogit(token, expert);
    default:
      return BadLogit(error == LogitError::kNaN, token, expert);
  }
}

Status ErrorOf(const ValueRecord& record) {
  const auto [a, b, c] = record.numbers;
  const auto invalid = [](const std::string& message) {
    return Status(Code::kInvalidArgument, message);
  };
  switch (static_cast<ValueError>(record.value_error)) {
    case ValueError::kNone:
      break;
    case ValueError::kIds:
      return invalid(fmt::format("ids: expected 0..{}, got {} at {}", c - 1, a, b));
    case ValueError::kPrompt:
      return invalid(fmt::format("prompt: expected 0..{}, got {} at {}", c - 1, a, b));
    case ValueError::kPosition:
      return invalid(
          a < 0 ? fmt::format("positions: expected 0 or more, got {} at {}", a, b)
                : fmt::format("positions: expected 0..{}, got {} at {}", kPositionLimit - 1, a, b));
    case ValueError::kNextPosition:
      return invalid(fmt::format("positions: expected {}, got {} at {}", c, a, b));
    case ValueError::kFirstRows:
      return invalid(
          fmt::format("first_rows: expected to ascend from 0 to {}, got {} at {}", c, a, b));
    case ValueError::kBlock:
      return invalid(fmt::format("block_tables: position {} is in block {} of {}", a, b, c));
    case ValueError::kPage:
      return invalid(fmt::format("block_tables: no page {} for block {} of sequence {}", a, b, c));
    case ValueError::kMark: {
      const Status error = SampleError(static_cast<int32_t>(a));
      return b < 0 ? error : error.WithContext(fmt::format("row {}", b));
    }
    case ValueError::kSamplerState:
      return invalid(fmt::format("states: row {} was not reset for {} tokens", a, b));
    case ValueError::kLatentPage:
      return invalid(fmt::format("pages: no page {} at {}", a, b));
    case ValueError::kPageTokens:
      return invalid(fmt::format("tokens: expected 0 to {}, got {} at {}", c, a, b));
    case ValueError::kStateRow:
      return invalid(fmt::format("state_rows: expected less than {}, got {} at {}", c, a, b));
    case ValueError::kCount:
      return invalid(fmt::format("counts: expected 0..{}, got {} at {}", c - 1, a, b));
    case ValueError::kStatePage:
      return invalid(fmt::format("pages: no page {} for sequence {}", a, b));
  }
  return Status(Code::kInternal, "an unknown error in device memory");
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
  if (record.value_error != 0) return ErrorOf(record);
  return Status(Code::kInvalidArgument,
                fmt::format("ids: token {}, selection {}: {} is not in 0..{}", record.token,
                            record.selection, record.id, record.experts - 1));
}

}  // namespace marlin::cuda
