// Buffers that many allocations share: a residency set then has a few dozen buffers, not the ten
// thousand matrices of a model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>

#include "backends/metal/apple/metal_cpp.h"
#include "backends/metal/apple/resident_buffers.h"
#include "marlin/status.h"

namespace marlin::metal {

/// A buffer, and the ranges of it that nothing uses.
struct BufferPiece {
  NS::SharedPtr<MTL::Buffer> buffer;
  std::byte* data = nullptr;
  int64_t bytes = 0;
  bool resident = false;            ///< It is in the residency set.
  std::map<int64_t, int64_t> free;  ///< Bytes by offset; no two ranges are adjacent.
};

class BufferPieces;

/// The memory of one allocation. Its end returns it, so that work in flight keeps it.
class BufferPart {
 public:
  BufferPart(std::shared_ptr<BufferPieces> pieces, BufferPiece& piece, int64_t offset,
             int64_t bytes);
  ~BufferPart();
  BufferPart(const BufferPart&) = delete;
  BufferPart& operator=(const BufferPart&) = delete;

  MTL::Buffer* buffer() const { return piece_.buffer.get(); }
  bool resident() const { return piece_.resident; }
  NS::UInteger offset() const { return static_cast<NS::UInteger>(offset_); }
  int64_t bytes() const { return bytes_; }
  std::byte* data() const { return piece_.data + offset_; }

 private:
  friend class BufferPieces;
  const std::shared_ptr<BufferPieces> pieces_;
  BufferPiece& piece_;
  const int64_t offset_;
  const int64_t bytes_;
};

/// Thread-safe.
class BufferPieces : public std::enable_shared_from_this<BufferPieces> {
 public:
  BufferPieces(NS::SharedPtr<MTL::Device> device, MTL::CommandQueue* queue)
      : device_(std::move(device)), resident_(device_.get(), queue) {}

  /// Aligned to 256 bytes. Errors: kOutOfMemory.
  Result<std::shared_ptr<const BufferPart>> Take(int64_t bytes);
  /// Whether a range has bytes of a piece.
  bool Overlaps(uintptr_t begin, uintptr_t end) const;
  ResidentBuffers& resident() { return resident_; }

 private:
  friend class BufferPart;
  std::shared_ptr<const BufferPart> TakeFree(int64_t size);
  std::shared_ptr<const BufferPart> TakeFrom(BufferPiece& piece, int64_t offset, int64_t size);
  /// Null: the device has no such memory.
  BufferPiece* Add(int64_t bytes);
  void Return(BufferPiece& piece, int64_t offset, int64_t bytes);

  const NS::SharedPtr<MTL::Device> device_;
  ResidentBuffers resident_;
  mutable std::mutex mutex_;
  std::list<BufferPiece> pieces_;  ///< Parts refer to them.
  int64_t shared_bytes_ = 0;       ///< The size of the pieces that are shared.
};

}  // namespace marlin::metal
