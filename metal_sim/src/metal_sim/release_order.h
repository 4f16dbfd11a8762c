// The order that atomic operations and fences make between threads, also of different threadgroups:
// an acquire makes the accesses before the release known. Must not know the rules of barriers or
// the owners of addresses. Costs nothing until a kernel uses an order other than relaxed.
//
// Every thread that took part keeps the epochs it knows: "of threadgroup 3 all accesses before
// epoch 7, of its simdgroup 1 all before epoch 2, of its thread 5 all before its release 1". A
// release stores this, with the releasing thread's own epochs, at the atomic; an acquire that reads
// from there merges it. A relaxed store ends the release sequence, a relaxed read-modify-write
// keeps it, as in the memory model of C++.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "metal_sim/access_record.h"

namespace metal_sim {

/// The state of a thread that orders depend on; `stamps` are its next records, one per kind of
/// memory.
struct OrderedThread {
  uint32_t group = 0;
  uint32_t index = 0;
  std::array<AccessRecord, kMemoryKinds>* stamps = nullptr;
};

class ReleaseOrder {
 public:
  /// Before an atomic operation at `address`; `order` and `scope` as in shim/abi.h.
  void Atomic(const OrderedThread& thread, uintptr_t address, bool read, bool write, int order);
  void Fence(const OrderedThread& thread, uint32_t flags, int order, int scope);
  /// All of `threads` passed a barrier with these memory flags: each knows the epochs that any of
  /// them knew.
  void Barrier(std::span<const OrderedThread> threads, uint32_t flags);
  /// Forgets the releases in [begin, end), whose memory is used anew.
  void Forget(uintptr_t begin, uintptr_t end);

  /// Whether any order was made at all: callers ask before they call Barrier or Knows.
  bool used() const { return used_; }
  /// Whether thread `index` of `group` knows of an access by a thread of `other_group`.
  bool Knows(const CurrentAccess& now, const AccessRecord& earlier, uint32_t other_group) const;

 private:
  /// Key: an owner (see the .cc). Value: every access of the owner below this epoch or count is
  /// known.
  using Knowledge = std::map<uint64_t, uint32_t>;
  struct Release {
    Knowledge knowledge;
    int scope = 0;
    uint32_t group = 0;
    uint32_t simdgroup = 0;
  };
  using ReleaseSet = std::set<std::shared_ptr<const Release>>;
  struct ThreadState {
    Knowledge known;
    std::shared_ptr<const Release> fenced;  ///< Published by relaxed stores since a fence.
    ReleaseSet read;                        ///< Seen by relaxed loads; a fence acquires it.
  };

  ThreadState& StateOf(const OrderedThread& thread);
  std::shared_ptr<const Release> MakeRelease(const OrderedThread& thread, uint32_t flags,
                                             int scope);
  static void Merge(const Knowledge& from, uint32_t flags, Knowledge* to);
  static bool Reaches(const Release& release, const OrderedThread& thread, int scope);

  bool used_ = false;
  std::unordered_map<uint64_t, ThreadState> threads_;
  std::map<uintptr_t, ReleaseSet> locations_;
};

}  // namespace metal_sim
