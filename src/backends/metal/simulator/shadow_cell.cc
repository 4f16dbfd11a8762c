#include "backends/metal/simulator/shadow_cell.h"

namespace marlin::metal::simulator {
namespace {

bool SameSimdgroup(const AccessRecord& a, const AccessRecord& b) {
  return a.group_epoch == b.group_epoch &&
         a.thread / kSimdgroupThreads == b.thread / kSimdgroupThreads;
}

bool SameThread(const AccessRecord& a, const AccessRecord& b) {
  return a.group_epoch == b.group_epoch && a.thread == b.thread;
}

bool Races(const AccessRecord& earlier, const CurrentAccess& now, const AccessOrder& order) {
  if (!earlier.used || (earlier.atomic && now.record.atomic)) return false;
  return !order.Ordered(earlier, now);
}

/// Whether a reader can be forgotten for `now`: it was before a barrier that `now` is behind, so
/// who races with it and is not behind that barrier races with `now` as well.
bool Superseded(const AccessRecord& reader, const CurrentAccess& now, const EpochTable& epochs) {
  if (!reader.used) return true;
  return reader.group_epoch != now.record.group_epoch &&
         epochs.GroupOf(reader, now.kind, now.group) == now.group;
}

void NoteReader(ShadowCell* cell, const CurrentAccess& now, const EpochTable& epochs) {
  AccessRecord& first = cell->readers[0];
  AccessRecord& second = cell->readers[1];
  for (AccessRecord& reader : cell->readers) {
    if (reader.used && SameThread(reader, now.record)) {
      const bool atomic = reader.atomic && now.record.atomic;
      reader = now.record;
      reader.atomic = atomic ? 1 : 0;
      return;
    }
  }
  for (AccessRecord& reader : cell->readers) {
    if (Superseded(reader, now, epochs)) {
      reader = now.record;
      return;
    }
  }
  const bool one_simdgroup = SameSimdgroup(first, second);
  if (one_simdgroup && !SameSimdgroup(first, now.record)) {
    second = now.record;
    return;
  }
  for (AccessRecord& reader : cell->readers) {
    const bool older = one_simdgroup && reader.simd_epoch != now.record.simd_epoch;
    // A plain read races with every write, an atomic one with plain writes only.
    if (older || (reader.atomic && !now.record.atomic)) {
      reader = now.record;
      return;
    }
  }
}

void NoteWriter(ShadowCell* cell, const CurrentAccess& now) {
  const bool after_own_plain_write =
      cell->writer.used && !cell->writer.atomic && SameThread(cell->writer, now.record);
  // Plain accesses of a thread stay visible behind its own atomic write.
  if (!now.record.atomic) cell->readers[0] = cell->readers[1] = AccessRecord{};
  cell->writer = now.record;
  if (after_own_plain_write) cell->writer.atomic = 0;
}

}  // namespace

bool AccessOrder::Ordered(const AccessRecord& earlier, const CurrentAccess& now) const {
  const AccessRecord& later = now.record;
  if (earlier.group_epoch == later.group_epoch) {
    if (earlier.thread == later.thread) return true;
    if (SameSimdgroup(earlier, later) && earlier.simd_epoch != later.simd_epoch) return true;
  } else if (epochs.GroupOf(earlier, now.kind, now.group) == now.group) {
    return true;
  }
  if (!releases.used()) return false;
  return releases.Knows(now, earlier, epochs.GroupOf(earlier, now.kind, now.group));
}

Conflict CheckCells(ShadowCell* cells, size_t bytes, const CurrentAccess& now, bool reads,
                    bool writes, bool initialised, const AccessOrder& order) {
  Conflict conflict;
  const auto object = [&](size_t byte, const AccessRecord& other, bool other_wrote) {
    if (conflict.what == Conflict::What::kRace) return;
    conflict = {Conflict::What::kRace, byte, other, other_wrote};
  };
  for (size_t byte = 0; byte < bytes; ++byte) {
    ShadowCell& cell = cells[byte];
    if (reads && !initialised && !cell.writer.used && conflict.what == Conflict::What::kNone) {
      conflict = {Conflict::What::kUninitialised, byte, {}, false};
    }
    if (Races(cell.writer, now, order)) object(byte, cell.writer, true);
    if (!writes) {
      NoteReader(&cell, now, order.epochs);
      continue;
    }
    for (const AccessRecord& reader : cell.readers) {
      if (Races(reader, now, order)) object(byte, reader, false);
    }
    NoteWriter(&cell, now);
  }
  return conflict;
}

}  // namespace marlin::metal::simulator
