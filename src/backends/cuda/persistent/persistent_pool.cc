#include "backends/cuda/persistent/persistent_pool.h"

#include <utility>

#include "base/macros.h"

namespace marlin::cuda {

Result<uint8_t*> StreamMemory::Of(cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  DeviceMemory& memory = of_streams_[stream];
  if (memory.data() == nullptr) {
    const AllowAllocation allow;
    MARLIN_ASSIGN_OR_RETURN(memory, DeviceMemory::Allocate(device_, bytes_));
    const std::vector<uint8_t> zeros(static_cast<size_t>(bytes_));
    const cudaError_t copied =
        cudaMemcpy(memory.data(), zeros.data(), zeros.size(), cudaMemcpyHostToDevice);
    MARLIN_RETURN_IF_ERROR(device_->errors.Check(copied, "cudaMemcpy"));
    // The copy may return before it is done, and other streams do not wait for it.
    MARLIN_RETURN_IF_ERROR(
        device_->errors.Check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize"));
  }
  return memory.data();
}

std::shared_ptr<StreamMemory> PersistentPool::Memory(const std::vector<int>& key, int64_t bytes) {
  if (key.empty()) return std::make_shared<StreamMemory>(device_, bytes);
  const std::lock_guard lock(mutex_);
  std::erase_if(memory_, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<StreamMemory>& found = memory_[key];
  std::shared_ptr<StreamMemory> memory = found.lock();
  if (memory == nullptr) {
    memory = std::make_shared<StreamMemory>(device_, bytes);
    found = memory;
  }
  return memory;
}

Result<std::shared_ptr<const DeviceMemory>> PersistentPool::Copy(const std::vector<uint8_t>& data) {
  std::string bytes(data.begin(), data.end());
  const std::lock_guard lock(mutex_);
  std::erase_if(copies_, [](const auto& entry) { return entry.second.expired(); });
  if (const auto found = copies_.find(bytes); found != copies_.end()) {
    if (auto memory = found->second.lock(); memory != nullptr) return memory;
  }
  MARLIN_ASSIGN_OR_RETURN(DeviceMemory made,
                          DeviceMemory::Allocate(device_, static_cast<int64_t>(data.size())));
  const cudaError_t copied =
      cudaMemcpy(made.data(), data.data(), data.size(), cudaMemcpyHostToDevice);
  MARLIN_RETURN_IF_ERROR(device_->errors.Check(copied, "cudaMemcpy"));
  auto memory = std::make_shared<const DeviceMemory>(std::move(made));
  copies_[std::move(bytes)] = memory;
  return memory;
}

}  // namespace marlin::cuda
