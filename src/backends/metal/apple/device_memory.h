// The driver's allocations, looked up by address.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "backends/metal/apple/buffer_pieces.h"
#include "backends/metal/apple/metal_cpp.h"
#include "marlin/status.h"

namespace marlin::metal {

/// A position in a buffer, in bytes.
struct BufferPlace {
  MTL::Buffer* buffer = nullptr;
  NS::UInteger offset = 0;
  std::shared_ptr<const BufferPart> part;  ///< Null: the caller's memory.
};

/// Buffers shared by host and GPU. Thread-safe.
class DeviceMemory {
 public:
  DeviceMemory(NS::SharedPtr<MTL::Device> device, MTL::CommandQueue* queue);

  /// Aligned to 256 bytes. Errors: kOutOfMemory.
  Result<void*> Allocate(int64_t bytes);
  /// The same for memory that nobody finds by its address.
  Result<std::shared_ptr<const BufferPart>> Take(int64_t bytes) { return pieces_->Take(bytes); }
  /// Parts that work in flight holds stay allocated.
  void Free(void* data);

  /// The buffer, offset and part of [data, data + bytes); without a buffer: not in this memory.
  /// Errors: kInvalidArgument for a range that is only partly in one allocation.
  Result<BufferPlace> Find(const void* data, int64_t bytes) const;

  ResidentBuffers& resident() const { return pieces_->resident(); }

 private:
  const std::shared_ptr<BufferPieces> pieces_;
  mutable std::mutex mutex_;
  /// By address of the first byte.
  std::map<uintptr_t, std::shared_ptr<const BufferPart>> parts_;
};

}  // namespace marlin::metal
