// Memory that the driver gave out, found again by its address.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "backends/metal/apple/metal_cpp.h"
#include "marlin/status.h"

namespace marlin::metal {

/// Bytes of a buffer from `offset` on.
struct BufferPlace {
  NS::SharedPtr<MTL::Buffer> buffer;
  NS::UInteger offset = 0;
};

/// Buffers that host and GPU share. Thread-safe.
class DeviceMemory {
 public:
  /// Keeps the buffers resident for what runs on the queue, where the system has residency sets
  /// (macOS 15) and until they fill what it recommends: prepared weights would else be made
  /// resident anew by every command buffer that comes after a pause.
  DeviceMemory(NS::SharedPtr<MTL::Device> device, MTL::CommandQueue* queue);

  /// Whole pages. Errors: kOutOfMemory.
  Result<void*> Allocate(int64_t bytes);
  /// Work that still uses it keeps the memory alive.
  void Free(void* data);

  /// Where [data, data + bytes) lies; none: not in this memory. Errors: kInvalidArgument for a
  /// range that is only partly in it.
  Result<std::optional<BufferPlace>> Find(const void* data, int64_t bytes) const;

  bool keeps_resident() const { return resident_.get() != nullptr; }

 private:
  void AddResident(MTL::Buffer* buffer);
  void RemoveResident(MTL::Buffer* buffer);

  NS::SharedPtr<MTL::Device> device_;
  NS::SharedPtr<MTL::ResidencySet> resident_;
  mutable std::mutex mutex_;
  std::map<uintptr_t, NS::SharedPtr<MTL::Buffer>> buffers_;  ///< By their first byte.
};

}  // namespace marlin::metal
