#include "backends/cuda/runtime/device_memory.h"

#include <algorithm>
#include <string>

#include "base/macros.h"

namespace marlin::cuda {

Result<DeviceMemory> DeviceMemory::Allocate(std::shared_ptr<DeviceHandle> device, int64_t bytes) {
  const DeviceScope scope(device->index);
  DeviceMemory memory;
  const std::string what = "cudaMalloc of " + std::to_string(bytes) + " bytes";
  MARLIN_RETURN_IF_ERROR(device->errors.Check(
      cudaMalloc(&memory.data_, static_cast<size_t>(std::max<int64_t>(bytes, 1))), what.c_str()));
  memory.device_ = std::move(device);
  return memory;
}

DeviceMemory::~DeviceMemory() {
  if (data_ == nullptr) return;
  const DeviceScope scope(device_->index);
  cudaFree(data_);
}

}  // namespace marlin::cuda
