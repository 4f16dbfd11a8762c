// The driver's allocations, looked up by address.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "backends/metal/apple/metal_cpp.h"
#include "marlin/status.h"

namespace marlin::metal {

/// A position in a buffer, in bytes.
struct BufferPlace {
  NS::SharedPtr<MTL::Buffer> buffer;
  NS::UInteger offset = 0;
};

/// Buffers shared by host and GPU. Thread-safe.
class DeviceMemory {
 public:
  /// Keeps the buffers resident for work on the queue if the system has residency sets (macOS 15),
  /// up to its recommended working-set size: otherwise the first command buffer after every pause
  /// would have to make the prepared weights resident again.
  DeviceMemory(NS::SharedPtr<MTL::Device> device, MTL::CommandQueue* queue);

  /// Rounds up to whole pages. Errors: kOutOfMemory.
  Result<void*> Allocate(int64_t bytes);
  /// Pending command buffers keep the memory alive.
  void Free(void* data);

  /// The buffer and offset of [data, data + bytes); nullopt: not in this memory. Errors:
  /// kInvalidArgument for a range that is only partly in it.
  Result<std::optional<BufferPlace>> Find(const void* data, int64_t bytes) const;

  bool keeps_resident() const { return resident_.get() != nullptr; }

 private:
  void AddResident(MTL::Buffer* buffer);
  void RemoveResident(MTL::Buffer* buffer);

  NS::SharedPtr<MTL::Device> device_;
  NS::SharedPtr<MTL::ResidencySet> resident_;
  mutable std::mutex mutex_;
  std::map<uintptr_t, NS::SharedPtr<MTL::Buffer>> buffers_;  ///< By address of the first byte.
};

}  // namespace marlin::metal
