// Device memory that fused runs of operations share.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "backends/cuda/runtime/device_memory.h"

namespace marlin::cuda {

/// As many bytes for every stream: exchange buffers and their clocks. A run of several launches
/// cannot have its other memory here: threads enqueue their launches on one stream alternately.
class StreamMemory {
 public:
  StreamMemory(std::shared_ptr<DeviceHandle> device, int64_t bytes)
      : device_(std::move(device)), bytes_(bytes) {}
  /// A stream's, which are zeros at first: launches on it follow each other. Errors: kOutOfMemory,
  /// kDeviceLost.
  Result<uint8_t*> Of(cudaStream_t stream);

 private:
  const std::shared_ptr<DeviceHandle> device_;
  const int64_t bytes_;
  std::mutex mutex_;
  std::map<cudaStream_t, DeviceMemory> of_streams_;
};

/// The memory of runs that are alike: a model with latent attention has a run for every layer.
/// Thread-safe.
class PersistentPool {
 public:
  explicit PersistentPool(std::shared_ptr<DeviceHandle> device) : device_(std::move(device)) {}

  const std::shared_ptr<DeviceHandle>& device() const { return device_; }
  /// The memory of all runs with the same key (ExchangeKey); with an empty one, of this run alone.
  std::shared_ptr<StreamMemory> Memory(const std::vector<int>& key, int64_t bytes);
  /// A copy of the bytes. Errors: kOutOfMemory, kDeviceLost.
  Result<std::shared_ptr<const DeviceMemory>> Copy(const std::vector<uint8_t>& data);

 private:
  const std::shared_ptr<DeviceHandle> device_;
  std::mutex mutex_;
  std::map<std::vector<int>, std::weak_ptr<StreamMemory>> memory_;
  std::map<std::string, std::weak_ptr<const DeviceMemory>> copies_;  ///< By their bytes.
};

}  // namespace marlin::cuda
