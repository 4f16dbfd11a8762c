// The race detector. Every checked byte has a cell that remembers its last writer and two readers
// since; an access is compared with them and then takes its place among them. Must not know
// addresses, names or how findings are reported.
//
// Two accesses of one byte by different threads race when at least one writes, not both are atomic,
// and nothing orders them. They are ordered, whatever the schedule was, when
//   - both are of one threadgroup and a threadgroup_barrier that names this memory lies between
//     them: their group epochs differ;
//   - both are of one simdgroup and a simdgroup_barrier that names this memory lies between them:
//     their simd epochs differ (lanes are not in lockstep: without a barrier they race);
//   - the later thread acquired what the earlier one released (release_order.h).
// The epochs count barriers, not time, so the same race is found with every schedule:
//
//     thread 0                        thread 40
//     tile[7] = x       (epoch 1)
//     threadgroup_barrier(mem_none)   threadgroup_barrier(mem_none)   orders nothing: still epoch 1
//                                     y = tile[7]       (epoch 1)     race: written in epoch 1
//     threadgroup_barrier(mem_tg)     threadgroup_barrier(mem_tg)     epoch 2
//                                     z = tile[7]       (epoch 2)     ordered: written in epoch 1
//     tile[7] = w       (epoch 2)                                     race with the read of z
//
// Two readers are enough: of two that are not in one simdgroup, at least one races with any later
// writer of the same epoch; of readers of one simdgroup, those of its latest epoch matter for a
// writer in that simdgroup and any for others. NoteReader keeps the two that decide. Beyond that,
// a plain access may hide behind atomic ones of other threads to the same byte.
#pragma once

#include <cstddef>

#include "backends/metal/simulator/access_record.h"
#include "backends/metal/simulator/release_order.h"

namespace marlin::metal::simulator {

/// All zeros: never accessed.
struct ShadowCell {
  AccessRecord writer;
  AccessRecord readers[2];
};

/// The first objection to an access, if any.
struct Conflict {
  enum class What : uint8_t { kNone, kRace, kUninitialised };
  What what = What::kNone;
  size_t byte = 0;           ///< Of the access.
  AccessRecord other;        ///< With kRace: the earlier access.
  bool other_wrote = false;  ///< With kRace.
};

/// Knows which accesses are ordered, and holds what that is decided by.
struct AccessOrder {
  EpochTable epochs;
  ReleaseOrder releases;

  /// Whether `earlier` happened before the current access, whatever the schedule.
  bool Ordered(const AccessRecord& earlier, const CurrentAccess& now) const;
};

/// Compares an access of `bytes` bytes with their cells and notes it there. An access that reads
/// and writes is an atomic one. `initialised`: bytes that nobody wrote may be read.
Conflict CheckCells(ShadowCell* cells, size_t bytes, const CurrentAccess& now, bool reads,
                    bool writes, bool initialised, const AccessOrder& order);

}  // namespace marlin::metal::simulator
