// Where the blocks of a product meet, in a device's memory.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "backends/cuda/device_memory.h"

namespace marlin::cuda {

/// Lends words of all ones to kernels that leave all ones behind. Whoever gives a workspace
/// promises that nothing else uses it until the product is done, replays of a captured graph
/// included; so what is lent belongs to the workspace's address. A workspace's contents could not
/// serve: nobody fills it. Thread-safe; allocates when it is made only.
class MeetingMemory {
 public:
  static constexpr int64_t kBytes = int64_t{32} << 20;

  /// Errors: kOutOfMemory, kDeviceLost.
  static Result<std::unique_ptr<MeetingMemory>> Make(const std::shared_ptr<DeviceHandle>& device);

  /// At least `bytes` for the products with a workspace, aligned to kAlignment; null where all is
  /// lent.
  uint32_t* Of(const void* workspace, int64_t bytes);
  static constexpr int64_t kAlignment = 256;

 private:
  struct Place {
    int64_t offset = 0;
    int64_t bytes = 0;
  };

  explicit MeetingMemory(DeviceMemory memory) : memory_(std::move(memory)) {}

  DeviceMemory memory_;
  std::mutex mutex_;
  std::unordered_map<const void*, Place> places_;
  int64_t lent_ = 0;
};

}  // namespace marlin::cuda
