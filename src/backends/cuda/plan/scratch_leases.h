// The bookkeeping of a device's split-K scratch memory: who has which part of it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace marlin::cuda {

/// Parts of a range of bytes, lent to keys. A key that has been lent enough finds it again without
/// a lock. Thread-safe but for TakeBack.
class ScratchLeases {
 public:
  static constexpr int64_t kAlignment = 256;
  static constexpr int64_t kNone = -1;

  /// Precondition: a multiple of kAlignment.
  explicit ScratchLeases(int64_t bytes) : free_end_(bytes) {}

  /// The offset of at least `bytes` that the key has; kNone where it has less. Takes no lock.
  int64_t Find(uint64_t key, int64_t bytes) const;

  /// The same, lent now where the key has less; kNone where too little is left. What it had before
  /// stays lent: sizes are powers of two, so that a key which wants ever more wastes no more than
  /// it has. Leases that are `for_good` outlive TakeBack. Precondition: the key is not 0.
  int64_t Lend(uint64_t key, int64_t bytes, bool for_good);

  /// Ends the leases that are not for good. Precondition: no other call runs, and no work uses
  /// them.
  void TakeBack();

 private:
  static constexpr size_t kSlots = 1024;
  struct Slot {
    std::atomic<uint64_t> key{0};
    std::atomic<int64_t> offset{0};
    std::atomic<int64_t> bytes{0};
    bool for_good = false;
  };

  /// The slot of a key, or the free one that it would take; null where there is neither.
  const Slot* SlotOf(uint64_t key) const;

  std::array<Slot, kSlots> slots_;
  std::mutex mutex_;
  int64_t free_begin_ = 0;  ///< Leases until TakeBack lie before,
  int64_t free_end_;        ///< those for good behind.
};

}  // namespace marlin::cuda
