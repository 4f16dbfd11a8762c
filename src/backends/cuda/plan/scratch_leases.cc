#include "backends/cuda/plan/scratch_leases.h"

#include <algorithm>
#include <bit>
#include <vector>

namespace marlin::cuda {

const ScratchLeases::Slot* ScratchLeases::SlotOf(uint64_t key) const {
  constexpr uint64_t kSpread = 0x9e3779b97f4a7c15ull;
  const size_t first = static_cast<size_t>((key * kSpread) >> 54);
  static_assert(kSlots == size_t{1} << 10);
  for (size_t i = 0; i < kSlots; ++i) {
    const Slot& slot = slots_[(first + i) % kSlots];
    const uint64_t found = slot.key.load(std::memory_order_acquire);
    if (found == key || found == 0) return &slot;
  }
  return nullptr;
}

int64_t ScratchLeases::Find(uint64_t key, int64_t bytes) const {
  const Slot* const slot = SlotOf(key);
  if (slot == nullptr || slot->key.load(std::memory_order_acquire) != key) return kNone;
  // Lend stores the offset of a growing lease before its size.
  if (slot->bytes.load(std::memory_order_acquire) < bytes) return kNone;
  return slot->offset.load(std::memory_order_relaxed);
}

int64_t ScratchLeases::Lend(uint64_t key, int64_t bytes, bool for_good) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (const int64_t known = Find(key, bytes); known != kNone) return known;
  auto* const slot = const_cast<Slot*>(SlotOf(key));
  if (slot == nullptr || bytes > free_end_ - free_begin_) return kNone;
  const auto wanted = static_cast<int64_t>(
      std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(bytes, kAlignment))));
  if (wanted > free_end_ - free_begin_) return kNone;
  int64_t offset = free_begin_;
  if (for_good) {
    free_end_ -= wanted;
    offset = free_end_;
  } else {
    free_begin_ += wanted;
  }
  slot->offset.store(offset, std::memory_order_relaxed);
  slot->for_good = for_good;
  slot->bytes.store(wanted, std::memory_order_release);
  slot->key.store(key, std::memory_order_release);
  return offset;
}

void ScratchLeases::TakeBack() {
  struct Kept {
    uint64_t key;
    int64_t offset;
    int64_t bytes;
  };
  std::vector<Kept> kept;
  for (Slot& slot : slots_) {
    if (slot.key != 0 && slot.for_good) kept.push_back({slot.key, slot.offset, slot.bytes});
    slot.key = 0;
  }
  for (const Kept& lease : kept) {
    auto* const slot = const_cast<Slot*>(SlotOf(lease.key));
    if (slot == nullptr) break;  // Never: as many leases fitted before.
    slot->offset = lease.offset;
    slot->bytes = lease.bytes;
    slot->for_good = true;
    slot->key = lease.key;
  }
  free_begin_ = 0;
}

}  // namespace marlin::cuda
