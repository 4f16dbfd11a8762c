// Bookkeeping of a device's split-K scratch memory: which key holds which range.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace marlin::cuda {

/// Lends ranges of a buffer to keys. A key finds a lease that is large enough again without a lock.
/// Thread-safe except TakeBack.
class ScratchLeases {
 public:
  static constexpr int64_t kAlignment = 256;
  static constexpr int64_t kNone = -1;

  /// Precondition: `bytes` is a multiple of kAlignment.
  explicit ScratchLeases(int64_t bytes) : free_end_(bytes) {}

  /// The offset of the key's lease if it has at least `bytes`, otherwise kNone. Takes no lock.
  int64_t Find(uint64_t key, int64_t bytes) const;

  /// As Find, but extends the lease if it is too small; kNone when too little is left. The smaller
  /// lease stays lent: sizes are powers of two, so a growing key wastes at most as much as it
  /// holds. Leases `for_good` survive TakeBack. Precondition: the key is not 0.
  int64_t Lend(uint64_t key, int64_t bytes, bool for_good);

  /// Ends all leases that are not for good. Precondition: no other call is running, and no work on
  /// the device uses them.
  void TakeBack();

 private:
  static constexpr size_t kSlots = 1024;
  struct Slot {
    std::atomic<uint64_t> key{0};
    std::atomic<int64_t> offset{0};
    std::atomic<int64_t> bytes{0};
    bool for_good = false;
  };

  /// The hash slot of a key, or the free one that it would take; null when the table is full.
  const Slot* SlotOf(uint64_t key) const;

  std::array<Slot, kSlots> slots_;
  std::mutex mutex_;
  int64_t free_begin_ = 0;  ///< Leases that TakeBack ends lie below,
  int64_t free_end_;        ///< leases for good lie above.
};

}  // namespace marlin::cuda
