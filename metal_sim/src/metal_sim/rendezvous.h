// Barriers and collectives: detects when one is complete, reports divergence among the threads that
// reached it, and orders their accesses. Must not know schedules or memory.
//
// A wait is settled when no thread that could still arrive can run: a simdgroup's when none of its
// lanes is runnable, a threadgroup's when none of its threads is. So a launch goes on, with a
// finding, where a GPU might hang; only threads that wait for each other's barriers end it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>

#include "metal_sim/access_checker.h"
#include "metal_sim/finding_log.h"
#include "metal_sim/shadow_cell.h"
#include "metal_sim/threads.h"

namespace metal_sim {

class Rendezvous {
 public:
  /// Runs a collective on behalf of `first`, the lowest of the lanes in the mask.
  using RunCollective = std::function<void(Thread& first, void* const* data, uint32_t lanes)>;

  /// Everything must outlive the rendezvous.
  Rendezvous(AccessOrder* order, FindingLog* log, Counters* counters, const AccessChecker* checker,
             RunCollective run);

  enum class Outcome : uint8_t { kNothing, kReleased, kDeadlock };
  /// To be called when a thread of this simdgroup began to wait or ended, after the counts of
  /// runnable threads were brought up to date. Releases the threads whose wait is over.
  Outcome Settle(Threadgroup* group, uint32_t simdgroup);

 private:
  /// The lanes of a simdgroup that are in each state, as masks.
  using LanesByState = std::array<uint32_t, kThreadStates>;
  static LanesByState LanesOf(const Threadgroup& group, uint32_t simdgroup);
  Outcome SettleSimdgroup(Threadgroup* group, uint32_t simdgroup);
  /// The lanes that wait in one collective: in the first of the code. In branches lanes are apart,
  /// as on a GPU, which lets the others wait where branches meet again: further on.
  static uint32_t FirstTogether(Threadgroup* group, uint32_t simdgroup, uint32_t waiting);
  void PassSimdgroupBarrier(Threadgroup* group, uint32_t simdgroup, uint32_t lanes);
  void PassCollective(Threadgroup* group, uint32_t simdgroup, uint32_t lanes);
  void PassThreadgroupBarrier(Threadgroup* group);

  void ReportBarrier(const Thread& first, const void* other_site, const std::string& what);
  /// Lets those threads of [begin, end) go on that wait in `state`; threads that know of releases
  /// share them.
  void Leave(Threadgroup* group, uint32_t begin, uint32_t end, uint32_t flags, ThreadState state);
  static void Release(Thread* thread);

  AccessOrder& order_;
  FindingLog& log_;
  Counters& counters_;
  const AccessChecker& checker_;
  RunCollective run_;
};

}  // namespace metal_sim
