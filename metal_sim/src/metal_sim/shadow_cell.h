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
//   - the later thread acquired a release of the earlier one (release_order.h).
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
// writer of the same epoch; of readers of one simdgroup, only the latest epoch's matter for a
// writer in that simdgroup and any for others. NoteReader keeps the two that decide. Beyond that,
// atomic accesses of other threads to the same byte may hide a plain one.
//
// Bytes of an aligned block of 8 that have been accessed together only, a run, share one cell, the
// first's: an access of 4 bytes to memory that is used by fours costs one comparison.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "metal_sim/access_record.h"
#include "metal_sim/mapped_memory.h"
#include "metal_sim/release_order.h"

namespace metal_sim {

/// All zeros: never accessed.
struct ShadowCell {
  AccessRecord writer;
  AccessRecord readers[2];
};

/// The first objection to an access, if any.
struct Conflict {
  enum class What : uint8_t { kNone, kRace, kUninitialised };
  What what = What::kNone;
  size_t byte = 0;           ///< Offset of the access.
  AccessRecord other;        ///< With kRace: the earlier access.
  bool other_wrote = false;  ///< With kRace.
};

/// Decides which accesses are ordered, and holds the state that this depends on.
struct AccessOrder {
  EpochTable epochs;
  ReleaseOrder releases;

  /// Whether `earlier`, of this launch, happened before the current access, whatever the schedule.
  bool Ordered(const AccessRecord& earlier, const CurrentAccess& now) const;
};

/// How the bytes of an access are used.
struct AccessUse {
  bool reads = false;
  bool writes = false;
  bool initialised = false;  ///< Bytes that were never written may be read.
};

/// The cells of a stretch of memory. Nothing is ever cleared: records of epochs before
/// CurrentAccess::first_epoch do not count.
class ShadowMemory {
 public:
  /// Errors: kOutOfMemory.
  static Result<ShadowMemory> Allocate(size_t bytes);

  /// How many bytes it shadows.
  size_t bytes() const { return starts_.size() * kBlock; }

  /// Compares an access of [offset, offset + bytes) with its cells and notes it there.
  Conflict Check(size_t offset, size_t bytes, const CurrentAccess& now, AccessUse use,
                 const AccessOrder& order) {
    Conflict conflict;
    for (size_t byte = 0; byte < bytes;) {
      const size_t at = offset + byte;
      const size_t length = std::min(bytes - byte, kBlock - at % kBlock);
      // The part is one run if a run starts at its first byte, none after it, one at its end.
      const unsigned starts = starts_[at / kBlock] | 1U | 1U << kBlock;
      const unsigned window = (2U << length) - 1;
      if (((starts >> at % kBlock) & window) == (1U | 1U << length)) {
        ShadowCell* const cell = CellOf(at);
        if (!NoteHarmless(cell, now, use)) CheckCell(cell, byte, now, use, order, &conflict);
      } else {
        CheckRuns({at, length, byte}, now, use, order, &conflict);
      }
      byte += length;
    }
    return conflict;
  }

 private:
  static constexpr size_t kBlock = 8;

  /// The cell of a run's first byte. Cells that are used together lie close together: for
  /// byte 0 of all blocks, then for bytes 4, 2, 6 and so on.
  ShadowCell* CellOf(size_t offset) const {
    constexpr uint8_t kPlanes[kBlock] = {0, 4, 2, 5, 1, 6, 3, 7};
    auto* const cells = reinterpret_cast<ShadowCell*>(memory_.data());
    return cells + kPlanes[offset % kBlock] * starts_.size() + offset / kBlock;
  }
  /// Whether an earlier access is of no interest to the current one, both plain: of the same
  /// thread, or of no thread, or, in threadgroup memory, before a barrier.
  static bool IsHarmless(const AccessRecord& earlier, const CurrentAccess& now) {
    if (earlier.group_epoch == now.record.group_epoch) return earlier.thread == now.record.thread;
    return now.kind == MemoryKind::kThreadgroup || !now.Knows(earlier);
  }
  static void Note(const CurrentAccess& now, AccessRecord* record) {
    // By fields: they have just been written one by one, and a copy would wait for that.
    record->group_epoch = now.record.group_epoch;
    record->simd_epoch = now.record.simd_epoch;
    record->site = now.record.site;
    record->thread = now.record.thread;
    record->atomic = 0;
    record->releases = now.record.releases;
  }
  /// CheckCell for the plain accesses that are most of all; false where it must decide.
  static bool NoteHarmless(ShadowCell* cell, const CurrentAccess& now, AccessUse use) {
    AccessRecord& first = cell->readers[0];
    AccessRecord& second = cell->readers[1];
    const bool atomic = now.record.atomic || cell->writer.atomic || first.atomic || second.atomic;
    if (atomic || !IsHarmless(cell->writer, now)) return false;
    if (use.reads && !use.initialised && !now.Knows(cell->writer)) return false;
    const bool harmless_first = IsHarmless(first, now);
    if (use.writes) {
      if (!harmless_first || !IsHarmless(second, now)) return false;
      first.group_epoch = second.group_epoch = 0;
      Note(now, &cell->writer);
      return true;
    }
    // As NoteReader: the thread's own record, or the first that does not count any more.
    const bool own_second =
        second.group_epoch == now.record.group_epoch && second.thread == now.record.thread;
    if (!harmless_first && !own_second) return false;
    const bool own_first =
        first.group_epoch == now.record.group_epoch && first.thread == now.record.thread;
    Note(now, own_second && !own_first ? &second : &first);
    return true;
  }

  /// Compares with one cell; `byte` is where its run begins in the access.
  static void CheckCell(ShadowCell* cell, size_t byte, const CurrentAccess& now, AccessUse use,
                        const AccessOrder& order, Conflict* conflict);
  /// Bytes of one block.
  struct Part {
    size_t offset;
    size_t bytes;
    size_t byte;  ///< Where they begin in the access.
  };
  /// Compares with the cells of all runs of a part.
  void CheckRuns(const Part& part, const CurrentAccess& now, AccessUse use,
                 const AccessOrder& order, Conflict* conflict);
  /// Makes a run start at `offset`.
  void Split(size_t offset);

  MappedMemory memory_;          ///< A cell per byte: bytes that start no run leave it unused.
  std::vector<uint8_t> starts_;  ///< Per block: bit i, but 0, where byte i starts a run.
};

}  // namespace metal_sim
