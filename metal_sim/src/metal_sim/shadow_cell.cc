#include "metal_sim/shadow_cell.h"

#include <bit>

namespace metal_sim {
namespace {

bool SameSimdgroup(const AccessRecord& a, const AccessRecord& b) {
  return a.group_epoch == b.group_epoch &&
         a.thread / kSimdgroupThreads == b.thread / kSimdgroupThreads;
}

bool SameThread(const AccessRecord& a, const AccessRecord& b) {
  return a.group_epoch == b.group_epoch && a.thread == b.thread;
}

bool Races(const AccessRecord& earlier, const CurrentAccess& now, const AccessOrder& order) {
  if (!now.Knows(earlier) || (earlier.atomic && now.record.atomic)) return false;
  return !order.Ordered(earlier, now);
}

/// Whether a reader can be forgotten for `now`: it was before a barrier that `now` is after, so
/// a thread that races with it and is not after that barrier races with `now` as well.
bool Superseded(const AccessRecord& reader, const CurrentAccess& now, const EpochTable& epochs) {
  if (!now.Knows(reader)) return true;
  return reader.group_epoch != now.record.group_epoch &&
         epochs.GroupOf(reader, now.kind, now.group) == now.group;
}

void NoteReader(ShadowCell* cell, const CurrentAccess& now, const EpochTable& epochs) {
  AccessRecord& first = cell->readers[0];
  AccessRecord& second = cell->readers[1];
  for (AccessRecord& reader : cell->readers) {
    if (SameThread(reader, now.record)) {
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
  const bool after_own_plain_write = !cell->writer.atomic && SameThread(cell->writer, now.record);
  // Plain accesses of a thread stay visible after its own atomic write.
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

Result<ShadowMemory> ShadowMemory::Allocate(size_t bytes) {
  ShadowMemory shadow;
  shadow.starts_.resize((bytes + kBlock - 1) / kBlock);
  METAL_SIM_ASSIGN_OR_RETURN(shadow.memory_,
                             MappedMemory::Allocate(shadow.bytes() * sizeof(ShadowCell)));
  return shadow;
}

void ShadowMemory::CheckCell(ShadowCell* cell, size_t byte, const CurrentAccess& now, AccessUse use,
                             const AccessOrder& order, Conflict* conflict) {
  const auto object = [&](const AccessRecord& other, bool other_wrote) {
    if (conflict->what == Conflict::What::kRace) return;
    *conflict = {Conflict::What::kRace, byte, other, other_wrote};
  };
  if (use.reads && !use.initialised && !now.Knows(cell->writer) &&
      conflict->what == Conflict::What::kNone) {
    *conflict = {Conflict::What::kUninitialised, byte, {}, false};
  }
  if (Races(cell->writer, now, order)) object(cell->writer, true);
  if (!use.writes) {
    NoteReader(cell, now, order.epochs);
    return;
  }
  for (const AccessRecord& reader : cell->readers) {
    if (Races(reader, now, order)) object(reader, false);
  }
  NoteWriter(cell, now);
}

void ShadowMemory::Split(size_t offset) {
  const size_t in_block = offset % kBlock;
  if (in_block == 0) return;
  uint8_t& starts = starts_[offset / kBlock];
  const auto bit = static_cast<uint8_t>(1U << in_block);
  if ((starts & bit) != 0) return;
  const unsigned before = (starts | 1U) & (bit - 1U);
  const size_t run = offset - in_block + static_cast<size_t>(std::bit_width(before)) - 1;
  *CellOf(offset) = *CellOf(run);
  starts |= bit;
}

void ShadowMemory::CheckRuns(const Part& part, const CurrentAccess& now, AccessUse use,
                             const AccessOrder& order, Conflict* conflict) {
  Split(part.offset);
  Split(part.offset + part.bytes);
  uint8_t& starts = starts_[part.offset / kBlock];
  for (size_t i = 0; i < part.bytes; ++i) {
    const auto bit = static_cast<uint8_t>(1U << (part.offset + i) % kBlock);
    const bool starts_run = i == 0 || (starts & bit) != 0;
    if (starts_run) CheckCell(CellOf(part.offset + i), part.byte + i, now, use, order, conflict);
    // A plain write leaves all cells alike.
    const bool merged = use.writes && !now.record.atomic && i != 0;
    if (merged) starts &= static_cast<uint8_t>(~bit);
  }
}

}  // namespace metal_sim
