#include "metal_sim/rendezvous.h"

#include <fmt/core.h>

#include <bit>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

namespace metal_sim {
namespace {

/// The mask of the first `count` lanes.
uint32_t FirstLanes(uint32_t count) { return count == 32 ? ~uint32_t{0} : (1U << count) - 1; }

Thread& LaneOf(Threadgroup* group, uint32_t simdgroup, uint32_t lane) {
  return group->threads[simdgroup * kSimdgroupThreads + lane];
}

}  // namespace

Rendezvous::Rendezvous(AccessOrder* order, FindingLog* log, Counters* counters,
                       const AccessChecker* checker, RunCollective run)
    : order_(*order), log_(*log), counters_(*counters), checker_(*checker), run_(std::move(run)) {}

Rendezvous::Outcome Rendezvous::Settle(Threadgroup* group, uint32_t simdgroup) {
  Outcome outcome = Outcome::kNothing;
  if (group->simdgroups[simdgroup].runnable == 0) outcome = SettleSimdgroup(group, simdgroup);
  if (outcome == Outcome::kNothing && group->runnable == 0 && group->live > 0) {
    PassThreadgroupBarrier(group);
    outcome = Outcome::kReleased;
  }
  return outcome;
}

Rendezvous::LanesByState Rendezvous::LanesOf(const Threadgroup& group, uint32_t simdgroup) {
  LanesByState lanes = {};
  const Thread* first = &group.threads[simdgroup * kSimdgroupThreads];
  for (uint32_t lane = 0; lane < group.simdgroups[simdgroup].size; ++lane) {
    lanes[static_cast<size_t>(first[lane].state)] |= 1U << lane;
  }
  return lanes;
}

Rendezvous::Outcome Rendezvous::SettleSimdgroup(Threadgroup* group, uint32_t simdgroup) {
  const LanesByState lanes_by_state = LanesOf(*group, simdgroup);
  const auto in = [&](ThreadState state) { return lanes_by_state[static_cast<size_t>(state)]; };
  // Lanes in a collective need no others: those that wait at a barrier wait for them.
  const uint32_t at_barrier = in(ThreadState::kAtSimdgroupBarrier);
  const uint32_t in_collective = in(ThreadState::kInCollective);
  if (in_collective != 0) {
    PassCollective(group, simdgroup, FirstTogether(group, simdgroup, in_collective));
    return Outcome::kReleased;
  }
  if (at_barrier == 0) return Outcome::kNothing;
  const uint32_t elsewhere = in(ThreadState::kAtThreadgroupBarrier);
  if (elsewhere != 0) {
    const auto here = static_cast<uint32_t>(std::countr_zero(at_barrier));
    const auto there = static_cast<uint32_t>(std::countr_zero(elsewhere));
    const Thread& first = LaneOf(group, simdgroup, here);
    const Thread& other = LaneOf(group, simdgroup, there);
    if (log_.Count(FindingKind::kDeadlock, first.waiting.site, other.waiting.site)) {
      log_.Describe(
          fmt::format("{} waits at a simdgroup_barrier and thread {} of its simdgroup at "
                      "a threadgroup_barrier: neither can pass, the launch ends here",
                      checker_.ThreadText(group->index, first.index), other.index));
    }
    return Outcome::kDeadlock;
  }
  PassSimdgroupBarrier(group, simdgroup, at_barrier);
  return Outcome::kReleased;
}

uint32_t Rendezvous::FirstTogether(Threadgroup* group, uint32_t simdgroup, uint32_t waiting) {
  const std::less<const void*> before;
  const Waiting* first = nullptr;
  for (uint32_t rest = waiting; rest != 0; rest &= rest - 1) {
    const Waiting& own =
        LaneOf(group, simdgroup, static_cast<uint32_t>(std::countr_zero(rest))).waiting;
    if (first == nullptr || before(own.site, first->site)) first = &own;
  }
  uint32_t lanes = 0;
  for (uint32_t rest = waiting; rest != 0; rest &= rest - 1) {
    const auto lane = static_cast<uint32_t>(std::countr_zero(rest));
    const Waiting& own = LaneOf(group, simdgroup, lane).waiting;
    const bool same = own.site == first->site && std::strcmp(own.name, first->name) == 0;
    if (same) lanes |= 1U << lane;
  }
  return lanes;
}

void Rendezvous::PassSimdgroupBarrier(Threadgroup* group, uint32_t simdgroup, uint32_t lanes) {
  const uint32_t size = group->simdgroups[simdgroup].size;
  const auto leader = static_cast<uint32_t>(std::countr_zero(lanes));
  const Thread& first = LaneOf(group, simdgroup, leader);
  if (lanes != FirstLanes(size)) {
    ReportBarrier(
        first, nullptr,
        fmt::format("simdgroup_barrier: {} of {} lanes came, {} waits there", std::popcount(lanes),
                    size, checker_.ThreadText(group->index, first.index)));
  }
  uint32_t flags = first.waiting.flags;
  for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    const auto lane = static_cast<uint32_t>(std::countr_zero(rest));
    const Thread& thread = LaneOf(group, simdgroup, lane);
    flags &= thread.waiting.flags;
    if (thread.waiting.site == first.waiting.site) continue;
    ReportBarrier(first, thread.waiting.site,
                  fmt::format("simdgroup_barrier: {} and thread {} wait at different ones",
                              checker_.ThreadText(group->index, first.index), thread.index));
  }
  ++counters_.simdgroup_barriers;
  for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    auto& stamps = LaneOf(group, simdgroup, static_cast<uint32_t>(std::countr_zero(rest))).stamps;
    if ((flags & kDevice) != 0) {
      ++stamps[static_cast<size_t>(MemoryKind::kDevice)].simd_epoch;
    }
    if ((flags & kThreadgroup) != 0) {
      ++stamps[static_cast<size_t>(MemoryKind::kThreadgroup)].simd_epoch;
    }
  }
  const uint32_t begin = simdgroup * kSimdgroupThreads;
  Leave(group, begin, begin + size, flags, ThreadState::kAtSimdgroupBarrier);
}

void Rendezvous::PassCollective(Threadgroup* group, uint32_t simdgroup, uint32_t lanes) {
  const auto leader = static_cast<uint32_t>(std::countr_zero(lanes));
  Thread& first = LaneOf(group, simdgroup, leader);
  if (first.waiting.whole && lanes != FirstLanes(kSimdgroupThreads) &&
      log_.Count(FindingKind::kDivergentCollective, first.waiting.site, nullptr)) {
    log_.Describe(fmt::format("{}: {} of {} lanes came, and it needs all; {} is one",
                              first.waiting.name, std::popcount(lanes), kSimdgroupThreads,
                              checker_.ThreadText(group->index, first.index)));
  }
  void* data[kSimdgroupThreads] = {};
  for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    const auto lane = static_cast<uint32_t>(std::countr_zero(rest));
    data[lane] = LaneOf(group, simdgroup, lane).waiting.data;
  }
  ++counters_.simdgroup_operations;
  run_(first, data, lanes);
  for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    Release(&LaneOf(group, simdgroup, static_cast<uint32_t>(std::countr_zero(rest))));
  }
}

void Rendezvous::PassThreadgroupBarrier(Threadgroup* group) {
  const Thread* first = nullptr;
  uint32_t flags = 0;
  for (uint32_t index = 0; index < group->thread_count; ++index) {
    const Thread& thread = group->threads[index];
    if (thread.state == ThreadState::kEnded) continue;
    if (first == nullptr) {
      first = &thread;
      flags = thread.waiting.flags;
    }
    flags &= thread.waiting.flags;
    if (thread.waiting.site == first->waiting.site) continue;
    ReportBarrier(*first, thread.waiting.site,
                  fmt::format("threadgroup_barrier: {} and thread {} wait at different ones",
                              checker_.ThreadText(group->index, first->index), thread.index));
  }
  if (group->live < group->thread_count) {
    ReportBarrier(*first, nullptr,
                  fmt::format("threadgroup_barrier: {} of {} threads have returned, {} waits there",
                              group->thread_count - group->live, group->thread_count,
                              checker_.ThreadText(group->index, first->index)));
  }
  ++counters_.threadgroup_barriers;
  const uint32_t device = (flags & kDevice) != 0 ? order_.epochs.NextOfDevice(group->index) : 0;
  const uint32_t threadgroup = (flags & kThreadgroup) != 0 ? order_.epochs.NextOfThreadgroup() : 0;
  for (uint32_t index = 0; index < group->thread_count; ++index) {
    auto& stamps = group->threads[index].stamps;
    if (device != 0) stamps[static_cast<size_t>(MemoryKind::kDevice)].group_epoch = device;
    if (threadgroup != 0) {
      stamps[static_cast<size_t>(MemoryKind::kThreadgroup)].group_epoch = threadgroup;
    }
  }
  Leave(group, 0, group->thread_count, flags, ThreadState::kAtThreadgroupBarrier);
}

void Rendezvous::Leave(Threadgroup* group, uint32_t begin, uint32_t end, uint32_t flags,
                       ThreadState state) {
  std::vector<OrderedThread> ordered;
  for (uint32_t index = begin; index < end; ++index) {
    Thread& thread = group->threads[index];
    if (thread.state != state) continue;
    if (order_.releases.used()) ordered.push_back(thread.Ordered());
    Release(&thread);
  }
  if (!ordered.empty()) order_.releases.Barrier(ordered, flags);
}

void Rendezvous::Release(Thread* thread) {
  thread->state = ThreadState::kRunnable;
  ++thread->group->runnable;
  ++thread->group->simdgroups[thread->simdgroup()].runnable;
}

void Rendezvous::ReportBarrier(const Thread& first, const void* other_site,
                               const std::string& what) {
  if (!log_.Count(FindingKind::kDivergentBarrier, first.waiting.site, other_site)) return;
  log_.Describe(what + "; this hangs or has no meaning on a GPU");
}

}  // namespace metal_sim
