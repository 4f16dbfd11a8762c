#include "metal_sim/release_order.h"

#include <algorithm>

#include "metal_sim/shim/abi.h"

namespace metal_sim {
namespace {

constexpr uint32_t kBothFlags = kDevice | kThreadgroup;
constexpr uint64_t kMostSimdgroups = 32;
constexpr uint64_t kMostThreads = 1024;

/// A key of Knowledge: the owner of an epoch or count.
enum class Owner : uint8_t { kGroup, kSimdgroup, kThread };

uint64_t Key(Owner owner, MemoryKind kind, uint64_t number) {
  return number << 4 | static_cast<uint64_t>(owner) << 1 | static_cast<uint64_t>(kind);
}

uint64_t GroupKey(MemoryKind kind, uint32_t group) { return Key(Owner::kGroup, kind, group); }

uint64_t SimdgroupKey(MemoryKind kind, uint32_t group, uint32_t thread) {
  return Key(Owner::kSimdgroup, kind, group * kMostSimdgroups + thread / kSimdgroupThreads);
}

uint64_t ThreadKey(MemoryKind kind, uint32_t group, uint32_t thread) {
  return Key(Owner::kThread, kind, group * kMostThreads + thread);
}

MemoryKind KindOf(uint64_t key) { return static_cast<MemoryKind>(key & 1); }

bool Covers(uint32_t flags, MemoryKind kind) {
  return (flags & (kind == MemoryKind::kDevice ? kDevice : kThreadgroup)) != 0;
}

bool Acquires(int order) {
  return order == kAcquire || order == kAcquireRelease || order == kSequential;
}

bool Releases(int order) {
  return order == kRelease || order == kAcquireRelease || order == kSequential;
}

}  // namespace

ReleaseOrder::ThreadState& ReleaseOrder::StateOf(const OrderedThread& thread) {
  return threads_[thread.group * kMostThreads + thread.index];
}

void ReleaseOrder::Merge(const Knowledge& from, uint32_t flags, Knowledge* to) {
  for (const auto& [key, below] : from) {
    if (!Covers(flags, KindOf(key))) continue;
    uint32_t& known = (*to)[key];
    known = std::max(known, below);
  }
}

bool ReleaseOrder::Reaches(const Release& release, const OrderedThread& thread, int scope) {
  switch (std::min(scope, release.scope)) {
    case kSimdgroupScope:
      return release.group == thread.group && release.simdgroup == thread.index / kSimdgroupThreads;
    case kThreadScope:
      return false;
    case kThreadgroupScope:
      return release.group == thread.group;
    default:
      return true;
  }
}

std::shared_ptr<const ReleaseOrder::Release> ReleaseOrder::MakeRelease(const OrderedThread& thread,
                                                                       uint32_t flags, int scope) {
  auto release = std::make_shared<Release>();
  release->scope = scope;
  release->group = thread.group;
  release->simdgroup = thread.index / kSimdgroupThreads;
  Knowledge own = StateOf(thread).known;
  for (const MemoryKind kind : {MemoryKind::kDevice, MemoryKind::kThreadgroup}) {
    AccessRecord& stamp = (*thread.stamps)[static_cast<size_t>(kind)];
    own[GroupKey(kind, thread.group)] = stamp.group_epoch;
    own[SimdgroupKey(kind, thread.group, thread.index)] = stamp.simd_epoch;
    own[ThreadKey(kind, thread.group, thread.index)] = stamp.releases + 1U;
    if (stamp.releases < kMostReleases) stamp.releases = (stamp.releases + 1U) & kMostReleases;
  }
  Merge(own, flags, &release->knowledge);
  return release;
}

void ReleaseOrder::Atomic(const OrderedThread& thread, uintptr_t address, bool read, bool write,
                          int order) {
  used_ = used_ || order != kRelaxed;
  if (!used_) return;
  ThreadState& state = StateOf(thread);
  auto& released = locations_[address];
  if (read) {
    for (const auto& release : released) {
      const bool acquired = Acquires(order) && Reaches(*release, thread, kSystemScope);
      if (acquired) Merge(release->knowledge, kBothFlags, &state.known);
    }
    state.read.insert(released.begin(), released.end());
  }
  if (!write) return;
  if (!read) released.clear();
  if (state.fenced != nullptr) released.insert(state.fenced);
  if (Releases(order)) released.insert(MakeRelease(thread, kBothFlags, kSystemScope));
}

void ReleaseOrder::Fence(const OrderedThread& thread, uint32_t flags, int order, int scope) {
  used_ = true;
  ThreadState& state = StateOf(thread);
  if (Acquires(order)) {
    for (const auto& release : state.read) {
      if (Reaches(*release, thread, scope)) Merge(release->knowledge, flags, &state.known);
    }
  }
  if (Releases(order)) state.fenced = MakeRelease(thread, flags, scope);
}

void ReleaseOrder::Barrier(std::span<const OrderedThread> threads, uint32_t flags) {
  Knowledge together;
  for (const OrderedThread& thread : threads) Merge(StateOf(thread).known, flags, &together);
  for (const OrderedThread& thread : threads) Merge(together, flags, &StateOf(thread).known);
}

void ReleaseOrder::Forget(uintptr_t begin, uintptr_t end) {
  locations_.erase(locations_.lower_bound(begin), locations_.lower_bound(end));
}

bool ReleaseOrder::Knows(const CurrentAccess& now, const AccessRecord& earlier,
                         uint32_t other_group) const {
  const auto state = threads_.find(now.group * kMostThreads + now.record.thread);
  if (state == threads_.end()) return false;
  const Knowledge& known = state->second.known;
  const auto below = [&known](uint64_t key, uint32_t value) {
    const auto entry = known.find(key);
    return entry != known.end() && value < entry->second;
  };
  const uint32_t thread = earlier.thread;
  return below(GroupKey(now.kind, other_group), earlier.group_epoch) ||
         below(SimdgroupKey(now.kind, other_group, thread), earlier.simd_epoch) ||
         below(ThreadKey(now.kind, other_group, thread), earlier.releases);
}

}  // namespace metal_sim
