// Caller memory that launches reference, as GPU buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backends/metal/apple/device_memory.h"
#include "backends/metal/runtime/driver.h"

namespace marlin::metal {

/// The caller memory that one Run references. Not thread-safe.
class CallerMemory {
 public:
  /// Overlapping ranges share one buffer, so that the launches of a Run see each other's writes.
  void Add(const KernelBuffer& buffer);
  /// Creates the buffers: the memory itself where it consists of whole pages that the GPU can map,
  /// else a copy of it. Errors: kOutOfMemory.
  Status Map(MTL::Device* device);
  /// The buffer and offset of an address that was added. Precondition: Map succeeded.
  BufferPlace Find(const void* data) const;

  bool empty() const { return pieces_.empty(); }
  /// Whether any range was copied; the caller's memory then has the results only after CopyBack.
  bool copied() const;
  /// Whether one of the two writes memory that the other reads or writes.
  bool Conflicts(const CallerMemory& other) const;
  /// Writes back only the bytes of copies that the GPU changed: another thread may be writing the
  /// bytes between the rows of an output. Precondition: the GPU work has completed.
  void CopyBack();

 private:
  struct Piece {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    bool written = false;
    NS::SharedPtr<MTL::Buffer> buffer;
    NS::UInteger offset = 0;  ///< Byte offset of `begin` in the buffer.
    bool copied = false;
    std::vector<std::byte> before;  ///< Contents before the launch, for copies that are written.

    bool Overlaps(const Piece& other) const { return begin < other.end && other.begin < end; }
  };
  static Status MapPiece(MTL::Device* device, Piece* piece);

  std::vector<Piece> pieces_;
};

}  // namespace marlin::metal
