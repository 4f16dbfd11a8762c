#include "backends/metal/apple/caller_memory.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/macros.h"

namespace marlin::metal {
namespace {

/// Copies keep the address modulo this, so that vectorized loads stay aligned.
constexpr uintptr_t kVectorBytes = 64;

}  // namespace

void CallerMemory::Add(const KernelBuffer& buffer) {
  Piece added;
  added.begin = reinterpret_cast<uintptr_t>(buffer.data);
  added.end = added.begin + static_cast<uintptr_t>(buffer.bytes);
  added.written = buffer.written;
  const auto joined = std::partition(pieces_.begin(), pieces_.end(),
                                     [&](const Piece& piece) { return !piece.Overlaps(added); });
  // Ranges in pieces_ are disjoint, so the union overlaps no other range.
  for (auto piece = joined; piece != pieces_.end(); ++piece) {
    added.begin = std::min(added.begin, piece->begin);
    added.end = std::max(added.end, piece->end);
    added.written = added.written || piece->written;
  }
  pieces_.erase(joined, pieces_.end());
  pieces_.push_back(std::move(added));
}

Status CallerMemory::Map(MTL::Device* device) {
  for (Piece& piece : pieces_) MARLIN_RETURN_IF_ERROR(MapPiece(device, &piece));
  return Status();
}

Status CallerMemory::MapPiece(MTL::Device* device, Piece* piece) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const NS::UInteger bytes = piece->end - piece->begin;
  void* const data = reinterpret_cast<void*>(piece->begin);  // NOLINT(performance-no-int-to-ptr)
  if (piece->begin % page == 0 && bytes % page == 0) {
    // Null if the pages belong to several mappings; they are copied then.
    piece->buffer =
        NS::TransferPtr(device->newBuffer(data, bytes, MTL::ResourceStorageModeShared, nullptr));
    if (piece->buffer.get() != nullptr) return Status();
  }
  piece->copied = true;
  piece->offset = piece->begin % kVectorBytes;
  piece->buffer =
      NS::TransferPtr(device->newBuffer(piece->offset + bytes, MTL::ResourceStorageModeShared));
  if (piece->buffer.get() == nullptr) {
    return Status(Code::kOutOfMemory,
                  fmt::format("metal: cannot allocate a copy of {} bytes of caller memory", bytes));
  }
  auto* const copy = static_cast<std::byte*>(piece->buffer->contents()) + piece->offset;
  std::memcpy(copy, data, bytes);
  if (piece->written) piece->before.assign(copy, copy + bytes);
  return Status();
}

BufferPlace CallerMemory::Find(const void* data) const {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const auto found = std::find_if(pieces_.begin(), pieces_.end(), [&](const Piece& piece) {
    return address >= piece.begin && address < piece.end;
  });
  return {found->buffer.get(), found->offset + (address - found->begin), nullptr};
}

bool CallerMemory::copied() const {
  return std::any_of(pieces_.begin(), pieces_.end(),
                     [](const Piece& piece) { return piece.copied; });
}

bool CallerMemory::Conflicts(const CallerMemory& other) const {
  return std::any_of(pieces_.begin(), pieces_.end(), [&](const Piece& piece) {
    return std::any_of(other.pieces_.begin(), other.pieces_.end(), [&](const Piece& with) {
      return (piece.written || with.written) && piece.Overlaps(with);
    });
  });
}

void CallerMemory::CopyBack() {
  for (Piece& piece : pieces_) {
    if (piece.before.empty()) continue;
    const auto* const after =
        static_cast<const std::byte*>(piece.buffer->contents()) + piece.offset;
    auto* const to =
        reinterpret_cast<std::byte*>(piece.begin);  // NOLINT(performance-no-int-to-ptr)
    for (size_t i = 0; i < piece.before.size(); ++i) {
      if (after[i] != piece.before[i]) to[i] = after[i];
    }
  }
}

}  // namespace marlin::metal
