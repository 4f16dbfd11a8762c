// Owned memory on one CUDA device, and the device that a thread's calls go to.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "backends/cuda/runtime/cuda_status.h"

namespace marlin::cuda {

/// Makes a device the calling thread's current one for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    cudaGetDevice(&before_);
    // Also where it is the current one: the driver's own functions need a thread that was given a
    // device, and a new thread was not.
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

/// A device and what is known of its health; shared by everything that lives on it.
struct DeviceHandle {
  int index = 0;
  ErrorLatch errors;
};

/// Move-only bytes on a device, aligned to 256.
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
