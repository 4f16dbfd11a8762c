// The simulator's copies of the bound buffers, laid out so that an access beside one is noticed
// and harmless. Must not know who accesses them.
//
// Address space is cut into equal slots, one per buffer, so that a shift finds an address's buffer:
//
//     | guard 32 MiB | slack 8 MiB | bytes of the buffer | slack 8 MiB | guard |
//
// An access to the slack can be let through after it was reported, one to the guard cannot.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backends/metal/simulator/launch.h"
#include "backends/metal/simulator/mapped_memory.h"
#include "backends/metal/simulator/shadow_cell.h"

namespace marlin::metal::simulator {

/// What a buffer is made of; `data` is only read here.
struct BufferContent {
  int index = 0;
  std::string name;
  const void* data = nullptr;
  size_t bytes = 0;
  bool read_only = false;
  bool initialised = true;
};

/// Which of a buffer's bytes were accessed: one bit each.
class ByteSet {
 public:
  explicit ByteSet(size_t bytes) : words_((bytes + 63) / 64) {}
  /// Adds [offset, offset + bytes) and returns how many of them are new.
  int64_t Add(size_t offset, size_t bytes);

 private:
  std::vector<uint64_t> words_;
};

struct DeviceBuffer {
  int index = 0;
  std::byte* data = nullptr;
  size_t bytes = 0;
  bool read_only = false;
  bool initialised = true;
  ShadowCell* cells = nullptr;  ///< One per byte; null where nothing can race.
  BufferCounters counters;
  ByteSet read;
  ByteSet written;

  uintptr_t begin() const { return reinterpret_cast<uintptr_t>(data); }
  void Count(size_t offset, size_t length, bool reads, bool writes);
};

class DeviceMemory {
 public:
  /// Copies the contents. `check`: writable buffers get cells. Errors: kOutOfMemory.
  static Result<DeviceMemory> Create(const std::vector<BufferContent>& contents, bool check);

  /// Whether an address lies in a buffer or in the space around one.
  bool Contains(uintptr_t address) const {
    return address - memory_.address() < buffers_.size() << slot_shift_;
  }
  /// Precondition: Contains(address).
  DeviceBuffer& NearestTo(uintptr_t address) {
    return buffers_[(address - memory_.address()) >> slot_shift_];
  }
  /// Whether [address, address + bytes), near `buffer`, can be accessed without a fault.
  static bool IsOpen(const DeviceBuffer& buffer, uintptr_t address, size_t bytes);

  /// The buffer bound to an index, or null.
  const DeviceBuffer* Find(int index) const;
  const std::vector<DeviceBuffer>& buffers() const { return buffers_; }

 private:
  MappedMemory memory_;
  int slot_shift_ = 0;
  std::vector<DeviceBuffer> buffers_;
  std::vector<MappedMemory> shadows_;
};

}  // namespace marlin::metal::simulator
