// The thread and the epoch of a memory access; epochs count barriers, not time. Must not know
// addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace metal_sim {

inline constexpr uint32_t kSimdgroupThreads = 32;

/// The two memories that mem_flags tell apart.
enum class MemoryKind : uint8_t { kDevice, kThreadgroup };
inline constexpr size_t kMemoryKinds = 2;

/// One access, without its address. All zeros: none.
struct AccessRecord {
  /// Grows with every threadgroup_barrier that orders this kind of memory. Barriers of device
  /// memory are unique in a launch, so they tell the threadgroup as well. Records of epochs before
  /// the first of a launch, or of a threadgroup for its memory, count as none: see CurrentAccess.
  uint32_t group_epoch = 0;
  /// Counts the simdgroup_barriers of the thread's simdgroup that order this kind of memory.
  uint32_t simd_epoch = 0;
  /// The low half of the address in the kernel's code; see SiteNear.
  uint32_t site = 0;
  uint32_t thread : 10 = 0;  ///< Index in its threadgroup.
  uint32_t atomic : 1 = 0;
  /// How often the thread had released (memory_order_release) before; stays at the largest value.
  uint32_t releases : 20 = 0;
};

inline constexpr uint32_t kMostReleases = (uint32_t{1} << 20) - 1;

/// An access that is about to happen, and the threadgroup it comes from.
struct CurrentAccess {
  AccessRecord record;
  /// Earlier epochs are of other users of the same shadow memory, which is never cleared.
  uint32_t first_epoch = 1;
  uint32_t group = 0;  ///< Linear index of the threadgroup.
  MemoryKind kind = MemoryKind::kDevice;

  bool Knows(const AccessRecord& earlier) const { return earlier.group_epoch >= first_epoch; }
};

inline uint32_t LowHalf(const void* site) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(site));
}

/// The site whose low half is `low`, given another one of the same library: code is far smaller
/// than the 4 GiB that the low half tells apart.
inline const void* SiteNear(uint32_t low, const void* other) {
  if (low == 0) return nullptr;
  const auto distance = static_cast<int32_t>(low - LowHalf(other));
  const auto address = reinterpret_cast<intptr_t>(other) + distance;
  return reinterpret_cast<const void*>(address);  // NOLINT(performance-no-int-to-ptr)
}

/// The last epochs that a piece of shadow memory has seen. Epoch 0 belongs to no launch: zeroed
/// memory has it.
struct LastEpochs {
  uint32_t of_device = 0;
  uint32_t of_threadgroup = 0;
};

/// Hands out the epochs of threadgroups, from those that the shadow memory has seen on, and knows
/// whose each one is.
class EpochTable {
 public:
  explicit EpochTable(LastEpochs last = {}) : first_of_device_(last.of_device + 1), last_(last) {}

  uint32_t NextOfDevice(uint32_t group) {
    owners_.push_back(group);
    return ++last_.of_device;
  }
  /// Epochs of threadgroup memory need no owner: no other threadgroup reaches that memory.
  uint32_t NextOfThreadgroup() { return ++last_.of_threadgroup; }

  /// The threadgroup that an access to memory of this kind came from. Precondition: of this launch.
  uint32_t GroupOf(const AccessRecord& record, MemoryKind kind, uint32_t own_group) const {
    if (kind == MemoryKind::kThreadgroup) return own_group;
    return owners_[record.group_epoch - first_of_device_];
  }

  uint32_t first_of_device() const { return first_of_device_; }
  LastEpochs last() const { return last_; }

 private:
  uint32_t first_of_device_;
  LastEpochs last_;
  std::vector<uint32_t> owners_;
};

}  // namespace metal_sim
