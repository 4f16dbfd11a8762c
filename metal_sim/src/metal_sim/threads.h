// The threads, simdgroups and threadgroups of a launch, as data. Owned by Simulation; must not know
// the rules by which they run.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "metal_sim/access_record.h"
#include "metal_sim/fiber.h"
#include "metal_sim/launch.h"
#include "metal_sim/release_order.h"
#include "metal_sim/threadgroup_memory.h"

namespace metal_sim {

struct Threadgroup;

enum class ThreadState : uint8_t {
  kRunnable,
  kAtThreadgroupBarrier,
  kAtSimdgroupBarrier,
  kInCollective,
  kEnded,
};
inline constexpr size_t kThreadStates = 5;

/// The wait of a thread that is not runnable.
struct Waiting {
  const void* site = nullptr;
  uint32_t flags = 0;  ///< The memory flags of a barrier.
  // For a collective:
  void* data = nullptr;
  Collective function = nullptr;
  void* context = nullptr;
  const char* name = "";
  bool whole = false;
};

struct Thread {
  uintptr_t stack_bottom = 0;  ///< The lowest address of its stack.
  Threadgroup* group = nullptr;
  uint32_t index = 0;  ///< In its threadgroup.
  ThreadState state = ThreadState::kEnded;
  /// The records that its next access leaves, per kind of memory.
  std::array<AccessRecord, kMemoryKinds> stamps;
  Waiting waiting;
  Triple position{};
  std::byte* stack = nullptr;  ///< stack_bottom as a pointer.
  Fiber fiber;

  uint32_t simdgroup() const { return index / kSimdgroupThreads; }
  uint32_t lane() const { return index % kSimdgroupThreads; }
  OrderedThread Ordered();
};

struct Simdgroup {
  uint32_t size = 0;
  uint32_t runnable = 0;
};

/// A place for one threadgroup at a time.
struct Threadgroup {
  size_t slot = 0;
  uint32_t index = 0;  ///< Linear, in the grid.
  Triple position{};
  Triple size{};  ///< Its threads; fewer than asked for at the edges of a grid.
  uint32_t thread_count = 0;
  uint32_t runnable = 0;
  uint32_t live = 0;         ///< Threads that have not ended; 0: the place is free.
  uint32_t first_epoch = 1;  ///< The epoch that its threadgroup memory begins with.
  std::unique_ptr<Thread[]> threads;
  std::vector<Simdgroup> simdgroups;
  ThreadgroupArena* arena = nullptr;
};

inline OrderedThread Thread::Ordered() { return {group->index, index, &stamps}; }

/// The position of linear index `index` in a box of `size`.
inline Triple PositionIn(Triple size, uint32_t index) {
  return {index % size.x, index / size.x % size.y, index / size.x / size.y};
}

}  // namespace metal_sim
