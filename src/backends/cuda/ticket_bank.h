// Counters at which the blocks of a product meet, in a device's memory.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "backends/cuda/device_memory.h"

namespace marlin::cuda {

/// Lends zeros to kernels that leave zeros behind. Whoever gives a workspace promises that nothing
/// else uses it until the product is done, replays of a captured graph included; so tickets belong
/// to the workspace's address. A workspace's contents could not hold them: nobody zeroes it.
/// Thread-safe; allocates when it is made only.
class TicketBank {
 public:
  static constexpr int kTickets = 2048;    ///< Of one workspace.
  static constexpr int kWorkspaces = 256;  ///< That get tickets; later ones do not.

  /// Errors: kOutOfMemory, kDeviceLost.
  static Result<std::unique_ptr<TicketBank>> Make(const std::shared_ptr<DeviceHandle>& device);

  /// The tickets of a workspace; null where more are wanted than it has, or for a workspace that
  /// comes after kWorkspaces others.
  uint32_t* Of(const void* workspace, int tickets);

 private:
  explicit TicketBank(DeviceMemory memory) : memory_(std::move(memory)) {}

  DeviceMemory memory_;
  std::mutex mutex_;
  std::unordered_map<const void*, int> places_;
};

}  // namespace marlin::cuda
