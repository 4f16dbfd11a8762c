// Errors that depend on values in device memory: kernels record them, Synchronize reports them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>

#include "backends/cuda/layout/value_record.h"
#include "backends/cuda/runtime/device_memory.h"

namespace marlin::cuda {

/// Host memory that kernels write to.
class ValueErrors {
 public:
  /// Errors: kOutOfMemory, kDeviceLost.
  static Result<std::unique_ptr<ValueErrors>> Make(DeviceHandle& device);
  ~ValueErrors();
  ValueErrors(const ValueErrors&) = delete;
  ValueErrors& operator=(const ValueErrors&) = delete;

  /// The record as kernels address it.
  ValueRecord* on_device() const { return on_device_; }
  /// The error that kernels have recorded since the last call, or Ok. Call it after the work.
  Status Take();

 private:
  ValueErrors(ValueRecord* record, ValueRecord* on_device)
      : record_(record), on_device_(on_device) {}

  std::mutex mutex_;
  ValueRecord* record_;
  ValueRecord* on_device_;
};

}  // namespace marlin::cuda
