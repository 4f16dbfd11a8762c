// Errors that depend on values in device memory: kernels record them, Synchronize reports them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "backends/cuda/layout/value_record.h"
#include "backends/cuda/runtime/device_memory.h"

namespace marlin::cuda {

/// A record in device memory and a flag in host memory, so that Take copies nothing unless there is
/// an error.
class ValueErrors {
 public:
  /// Errors: kOutOfMemory, kDeviceLost.
  static Result<std::unique_ptr<ValueErrors>> Make(const std::shared_ptr<DeviceHandle>& device);
  ~ValueErrors();
  ValueErrors(const ValueErrors&) = delete;
  ValueErrors& operator=(const ValueErrors&) = delete;

  ErrorView view() const { return view_; }
  /// The error that kernels have recorded since the last call, or Ok. Call it after the work.
  Status Take();

 private:
  ValueErrors(std::shared_ptr<DeviceHandle> device, DeviceMemory record)
      : device_(std::move(device)), record_(std::move(record)) {}
  Status Reset();

  std::mutex mutex_;
  std::shared_ptr<DeviceHandle> device_;
  DeviceMemory record_;
  volatile int* any_ = nullptr;
  ErrorView view_;
};

}  // namespace marlin::cuda
