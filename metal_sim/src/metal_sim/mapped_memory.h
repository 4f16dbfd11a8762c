// Address space from the operating system: reserved as a whole, usable in part, zero at first and
// backed by memory only where it is touched. Must not know its content.
#pragma once

#include <cstddef>
#include <cstdint>

#include "metal_sim/status.h"

namespace metal_sim {

/// A move-only reservation; addresses in it that were not opened cannot be accessed.
class MappedMemory {
 public:
  MappedMemory() = default;
  ~MappedMemory();
  MappedMemory(MappedMemory&& other) noexcept;
  MappedMemory& operator=(MappedMemory&& other) noexcept;

  /// Reserves `bytes`, rounded up to pages. Errors: kOutOfMemory.
  static Result<MappedMemory> Reserve(size_t bytes);
  /// Reserves and opens all of it. Errors: kOutOfMemory.
  static Result<MappedMemory> Allocate(size_t bytes);

  /// Makes the pages that hold [offset, offset + bytes) readable and writable. Errors:
  /// kOutOfMemory.
  Status Open(size_t offset, size_t bytes);

  std::byte* data() const { return data_; }
  uintptr_t address() const { return reinterpret_cast<uintptr_t>(data_); }
  size_t size() const { return size_; }

  /// Rounds up to whole pages.
  static size_t WholePages(size_t bytes);

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace metal_sim
