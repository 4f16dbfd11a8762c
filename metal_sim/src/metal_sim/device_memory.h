// The simulator's copies of the bound buffers, laid out so that an access outside of one is noticed
// and harmless. Must not know the threads that access them.
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

#include "metal_sim/byte_set.h"
#include "metal_sim/launch.h"
#include "metal_sim/mapped_memory.h"
#include "metal_sim/shadow_cell.h"

namespace metal_sim {

/// The content of a buffer; `data` is only read here.
struct BufferContent {
  int index = 0;
  std::string name;
  const void* data = nullptr;
  size_t bytes = 0;
  bool read_only = false;
  bool initialised = true;
};

struct DeviceBuffer {
  std::byte* data = nullptr;
  const void* origin = nullptr;  ///< The caller's memory.
  size_t bytes = 0;
  int index = 0;
  bool read_only = false;
  bool initialised = true;
  ShadowMemory* shadow = nullptr;  ///< Null where nothing can race.
  ByteSet read;
  ByteSet written;
  BufferCounters counters;  ///< Without unique bytes; see Counted.

  uintptr_t begin() const { return reinterpret_cast<uintptr_t>(data); }
  /// Whether an access that begins this far after the buffer's first byte lies in it.
  bool Holds(size_t offset, size_t length) const {
    return offset <= bytes && length <= bytes - offset;
  }
  /// Precondition: Holds(offset, length), length > 0.
  void Count(size_t offset, size_t length, bool reads, bool writes) {
    if (reads) {
      ++counters.reads;
      counters.bytes_read += static_cast<int64_t>(length);
      read.Add(offset, length);
    }
    if (writes) {
      ++counters.writes;
      counters.bytes_written += static_cast<int64_t>(length);
      written.Add(offset, length);
    }
  }
  /// The counters, unique bytes included.
  BufferCounters Counted() const;
};

/// Serves one launch after the other: memory mapped for one is kept for the next.
class DeviceMemory {
 public:
  /// Copies the contents of a launch; the last one's are forgotten. `check`: writable buffers get
  /// shadow memory. Errors: kOutOfMemory.
  Status Place(const std::vector<BufferContent>& contents, bool check);

  /// Whether an address lies in a buffer or in the space around one.
  bool Contains(uintptr_t address) const { return address - memory_.address() < used_bytes_; }
  /// Precondition: Contains(address).
  DeviceBuffer& NearestTo(uintptr_t address) {
    return buffers_[(address - memory_.address()) >> slot_shift_];
  }
  /// Whether [address, address + bytes), near `buffer`, can be accessed without a fault.
  static bool IsOpen(const DeviceBuffer& buffer, uintptr_t address, size_t bytes);

  /// The buffer bound to an index, or null.
  const DeviceBuffer* Find(int index) const;
  const std::vector<DeviceBuffer>& buffers() const { return buffers_; }
  /// How much of the machine's memory the buffers may hold on to.
  size_t held_bytes() const;

 private:
  struct Slot {
    size_t opened = 0;  ///< Bytes after the first guard that can be accessed.
    size_t filled = 0;  ///< How many bytes the last buffer had.
    ShadowMemory shadow;
  };

  Status Reserve(size_t largest, size_t count);
  Result<std::byte*> Fill(size_t number, const BufferContent& content);

  MappedMemory memory_;
  int slot_shift_ = 0;
  size_t used_bytes_ = 0;  ///< Size of the slots that hold buffers.
  std::vector<Slot> slots_;
  std::vector<DeviceBuffer> buffers_;
};

}  // namespace metal_sim
