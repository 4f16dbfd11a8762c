// Who accessed memory and when, in terms of barriers rather than time. Must not know addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace marlin::metal::simulator {

inline constexpr uint32_t kSimdgroupThreads = 32;

/// The two memories that mem_flags tell apart.
enum class MemoryKind : uint8_t { kDevice, kThreadgroup };
inline constexpr size_t kMemoryKinds = 2;

/// One access, without its address. All zeros: none.
struct AccessRecord {
  /// Grows with every threadgroup_barrier that orders this kind of memory. Those of device memory
  /// are unique in a launch, so they tell the threadgroup as well.
  uint32_t group_epoch = 0;
  /// Counts the simdgroup_barriers of the thread's simdgroup that order this kind of memory.
  uint32_t simd_epoch = 0;
  /// The low half of the address in the kernel's code; see SiteNear.
  uint32_t site = 0;
  uint32_t thread : 10 = 0;  ///< Index in its threadgroup.
  uint32_t used : 1 = 0;
  uint32_t atomic : 1 = 0;
  /// How often the thread had released (memory_order_release) before; stays at the largest value.
  uint32_t releases : 20 = 0;
};

inline constexpr uint32_t kMostReleases = (uint32_t{1} << 20) - 1;

/// An access that is about to happen, and the threadgroup it comes from.
struct CurrentAccess {
  AccessRecord record;
  uint32_t group = 0;  ///< Linear index of the threadgroup.
  MemoryKind kind = MemoryKind::kDevice;
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

/// Hands out the epochs of threadgroups and knows whose each one is.
class EpochTable {
 public:
  /// Epoch 0 is nobody's: unused records have it.
  EpochTable() : owners_(1, 0) {}

  uint32_t NextOfDevice(uint32_t group) {
    owners_.push_back(group);
    return static_cast<uint32_t>(owners_.size() - 1);
  }
  /// Epochs of threadgroup memory need no owner: no other threadgroup reaches that memory.
  uint32_t NextOfThreadgroup() { return ++last_of_threadgroup_; }

  /// The threadgroup that an access to memory of this kind came from.
  uint32_t GroupOf(const AccessRecord& record, MemoryKind kind, uint32_t own_group) const {
    return kind == MemoryKind::kDevice ? owners_[record.group_epoch] : own_group;
  }

 private:
  std::vector<uint32_t> owners_;
  uint32_t last_of_threadgroup_ = 0;
};

}  // namespace marlin::metal::simulator
