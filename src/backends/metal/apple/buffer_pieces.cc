#include "backends/metal/apple/buffer_pieces.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/checked.h"

namespace marlin::metal {
namespace {

/// The offsets of buffers that are bound to constant memory are multiples of this on every GPU.
constexpr int64_t kAlignment = 256;
/// Pieces are as large as all before them, within these limits: a process with a few small matrices
/// does not take the memory of a model.
constexpr int64_t kSmallest = int64_t{1} << 20;
constexpr int64_t kLargest = int64_t{256} << 20;
/// Larger allocations have a buffer of their own.
constexpr int64_t kLargestShared = kLargest / 4;

int64_t PageBytes() { return static_cast<int64_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

BufferPart::BufferPart(std::shared_ptr<BufferPieces> pieces, BufferPiece& piece, int64_t offset,
                       int64_t bytes)
    : pieces_(std::move(pieces)), piece_(piece), offset_(offset), bytes_(bytes) {}

BufferPart::~BufferPart() { pieces_->Return(piece_, offset_, bytes_); }

Result<std::shared_ptr<const BufferPart>> BufferPieces::Take(int64_t bytes) {
  const auto largest = static_cast<int64_t>(device_->maxBufferLength());
  if (bytes > largest) {
    return Status(Code::kOutOfMemory,
                  fmt::format("metal: a buffer of {} bytes, this GPU takes {}", bytes, largest));
  }
  const int64_t size = RoundUp(std::max<int64_t>(bytes, 1), kAlignment);
  const std::lock_guard lock(mutex_);
  const bool shares = size <= kLargestShared;
  if (shares) {
    if (std::shared_ptr<const BufferPart> part = TakeFree(size)) return part;
  }
  BufferPiece* piece = nullptr;
  if (shares) {
    const int64_t whole = std::clamp(shared_bytes_, kSmallest, kLargest);
    piece = Add(std::max(std::min(whole, largest), RoundUp(size, PageBytes())));
  }
  if (piece == nullptr) piece = Add(RoundUp(size, PageBytes()));
  if (piece == nullptr) {
    return Status(Code::kOutOfMemory, fmt::format("metal: {} bytes: cannot allocate", bytes));
  }
  if (shares) shared_bytes_ += piece->bytes;
  return TakeFrom(*piece, 0, shares ? size : piece->bytes);
}

std::shared_ptr<const BufferPart> BufferPieces::TakeFree(int64_t size) {
  for (BufferPiece& piece : pieces_) {
    const auto fits = std::find_if(piece.free.begin(), piece.free.end(),
                                   [size](const auto& range) { return range.second >= size; });
    if (fits != piece.free.end()) return TakeFrom(piece, fits->first, size);
  }
  return nullptr;
}

std::shared_ptr<const BufferPart> BufferPieces::TakeFrom(BufferPiece& piece, int64_t offset,
                                                         int64_t size) {
  const int64_t left = piece.free.at(offset) - size;
  piece.free.erase(offset);
  if (left > 0) piece.free.emplace(offset + size, left);
  return std::make_shared<const BufferPart>(shared_from_this(), piece, offset, size);
}

BufferPiece* BufferPieces::Add(int64_t bytes) {
  const AutoreleaseScope scope;
  BufferPiece piece;
  piece.bytes = bytes;
  piece.buffer = NS::TransferPtr(
      device_->newBuffer(static_cast<NS::UInteger>(bytes), MTL::ResourceStorageModeShared));
  if (piece.buffer.get() == nullptr) return nullptr;
  piece.buffer->setLabel(MakeText("marlin"));
  piece.data = static_cast<std::byte*>(piece.buffer->contents());
  piece.resident = resident_.Add(piece.buffer.get());
  piece.free.emplace(0, bytes);
  pieces_.push_back(std::move(piece));
  return &pieces_.back();
}

void BufferPieces::Return(BufferPiece& piece, int64_t offset, int64_t bytes) {
  const AutoreleaseScope scope;
  const std::lock_guard lock(mutex_);
  auto returned = piece.free.emplace(offset, bytes).first;
  if (const auto next = std::next(returned);
      next != piece.free.end() && next->first == offset + bytes) {
    returned->second += next->second;
    piece.free.erase(next);
  }
  if (returned != piece.free.begin()) {
    const auto before = std::prev(returned);
    if (before->first + before->second == offset) {
      before->second += returned->second;
      piece.free.erase(returned);
    }
  }
  if (piece.free.begin()->second != piece.bytes) return;
  if (piece.resident) resident_.Remove(piece.buffer.get());
  // Buffers that are larger than any shared part were not shared.
  const bool shared = bytes <= kLargestShared;
  if (shared) shared_bytes_ -= piece.bytes;
  pieces_.remove_if([&piece](const BufferPiece& other) { return &other == &piece; });
}

bool BufferPieces::Overlaps(uintptr_t begin, uintptr_t end) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(pieces_.begin(), pieces_.end(), [&](const BufferPiece& piece) {
    const auto first = reinterpret_cast<uintptr_t>(piece.data);
    return begin < first + static_cast<uintptr_t>(piece.bytes) && first < end;
  });
}

}  // namespace marlin::metal
