// Memory of the caller's that launches name, as buffers of the GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backends/metal/apple/device_memory.h"
#include "backends/metal/driver.h"

namespace marlin::metal {

/// What one Run names beside the driver's own memory. Not thread-safe.
class CallerMemory {
 public:
  /// Ranges that overlap are one buffer, so that the launches of a Run see what others write.
  void Add(const KernelBuffer& buffer);
  /// Makes the buffers: the memory itself where it is whole pages that the GPU can map, else a copy
  /// of it. Errors: kOutOfMemory.
  Status Map(MTL::Device* device);
  /// Where an address that was added lies. Precondition: Map succeeded.
  BufferPlace Find(const void* data) const;

  bool empty() const { return pieces_.empty(); }
  /// Whether there are copies; then the caller's memory has the results only after CopyBack.
  bool copied() const;
  /// Whether one of both writes what the other one reads or writes.
  bool Conflicts(const CallerMemory& other) const;
  /// Writes what the GPU changed of copies, once it is done, and nothing else: the bytes between
  /// the rows of an output are somebody else's, who may be writing them now.
  void CopyBack();

 private:
  struct Piece {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    bool written = false;
    NS::SharedPtr<MTL::Buffer> buffer;
    NS::UInteger offset = 0;  ///< Of `begin` in the buffer.
    bool copied = false;
    std::vector<std::byte> before;  ///< Of a copy that is written.

    bool Overlaps(const Piece& other) const { return begin < other.end && other.begin < end; }
  };
  static Status MapPiece(MTL::Device* device, Piece* piece);

  std::vector<Piece> pieces_;
};

}  // namespace marlin::metal
