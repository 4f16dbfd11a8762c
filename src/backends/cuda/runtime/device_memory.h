// Owned memory on one CUDA device, and a scope that sets the thread's current device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "backends/cuda/runtime/cuda_status.h"

namespace marlin::cuda {

/// Makes a device the calling thread's current device for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    cudaGetDevice(&before_);
    // Even where it is current already: driver API calls need a thread with a bound context, which
    // a new thread lacks.
    cudaSetDevice(device);
    changed_ = before_ != device;
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

/// Lets this thread allocate and fill memory while a stream is captured: that belongs to no graph.
class AllowAllocation {
 public:
  AllowAllocation() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~AllowAllocation() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  AllowAllocation(const AllowAllocation&) = delete;
  AllowAllocation& operator=(const AllowAllocation&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// A device and its error latch; shared by everything that lives on it.
struct DeviceHandle {
  int index = 0;
  ErrorLatch errors;
};

/// A move-only device allocation, aligned to 256 bytes.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  /// Errors: kOutOfMemory naming the size, kDeviceLost.
  static Result<DeviceMemory> Allocate(std::shared_ptr<DeviceHandle> device, int64_t bytes);
  DeviceMemory(DeviceMemory&& other) noexcept
      : device_(std::move(other.device_)), data_(std::exchange(other.data_, nullptr)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~DeviceMemory();

  uint8_t* data() const { return static_cast<uint8_t*>(data_); }
  void* Release() { return std::exchange(data_, nullptr); }

 private:
  std::shared_ptr<DeviceHandle> device_;
  void* data_ = nullptr;
};

}  // namespace marlin::cuda
