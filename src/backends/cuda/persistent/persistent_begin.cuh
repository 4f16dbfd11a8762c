// The start of the persistent kernel: a CTA's part of attention, found once, since divisions take a
// hundred clocks.
#pragma once

#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/persistent/persistent_attention.cuh"

namespace marlin::cuda {

MARLIN_DEVICE bool HasKeys(const PersistentArguments& args, int group) {
  return args.groups[group].block_table != nullptr && (args.key_groups >> group & 1) != 0;
}

/// The CTA's keys in all cache groups. Called by one thread.
template <PersistentForm kForm>
MARLIN_DEVICE void FindKeys(const PersistentArguments& args) {
  PersistentScratch& scratch = Tables{args}.Scratch();
  for (int group = 0; group < kMostCacheGroups; ++group) {
    if (!HasKeys(args, group)) continue;
    scratch.attention[group] = PartOf<kForm>(args, group, scratch.position);
  }
}

/// The rows' sequences.
MARLIN_DEVICE SequencesView SequencesOfRows(const PersistentArguments& args) {
  return {args.position, args.first_rows, nullptr, args.rows, args.sequences, 0};
}

/// Finds the CTA's row with its sequence, and the new keys in the CTA's part: the sequence's rows
/// up to the CTA's have them, at consecutive positions. Called by one thread.
MARLIN_DEVICE void FindNewKeys(const PersistentArguments& args, int row) {
  PersistentScratch& scratch = Tables{args}.Scratch();
  RowsScratch& rows = FixedRows();
  const SequencesView sequences = SequencesOfRows(args);
  scratch.sequence = SequenceOf(sequences, row);
  rows.row = row;
  rows.earlier = max(row - FirstRow(sequences, scratch.sequence), 0);
  for (int group = 0; group < kMostCacheGroups; ++group) {
    if (!HasKeys(args, group)) continue;
    const AttentionPart& part = scratch.attention[group];
    const int least = max(part.first_key, part.first_block * kWarpKeys);
    // The position may be any number.
    rows.new_keys[group] = {max(max(scratch.position, 0) - rows.earlier, least),
                            min(scratch.position, part.end_block * kWarpKeys - 1) + 1};
  }
}

/// The pages of the CTA's first keys and of the new one.
template <PersistentForm kForm>
MARLIN_DEVICE void FindFirstPages(const PersistentArguments& args) {
  const int teams = TeamsOf<kForm>(args);
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread > teams) return;
  PersistentScratch& scratch = Tables{args}.Scratch();
  for (int group = 0; group < kMostCacheGroups; ++group) {
    if (!HasKeys(args, group)) continue;
    AttentionPart& part = scratch.attention[group];
    const int block = thread < teams ? part.first_block + thread : scratch.position / kWarpKeys;
    if (block < part.first_block || block >= part.end_block) continue;
    uint8_t* const page = FindPage<kForm>(args, group, block * kWarpKeys);
    if (thread < teams) {
      part.pages[thread] = page;
    } else {
      part.fresh = page;
    }
  }
}

MARLIN_DEVICE void CheckPosition(const PersistentArguments& args, int position) {
  if (args.key_groups == 0) return;
  if (position < 0) {
    RecordError(args.errors, ValueError::kPosition, position, 0);
    return;
  }
  const int block = position / kCachePageTokens;
  for (int group = 0; group < kMostCacheGroups; ++group) {
    const CacheGroup& pages = args.groups[group];
    if (!HasKeys(args, group) || block < pages.blocks) continue;
    RecordError(args.errors, ValueError::kBlock, position, block, pages.blocks);
  }
}

/// BeginTables for rows of one sequence: records positions that are not consecutive, and stores the
/// rotations of the earlier rows after the rotations of the CTA's own row. Called by all threads
/// that compute, after FindNewKeys.
MARLIN_DEVICE void BeginRows(const PersistentArguments& args) {
  const auto thread = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0) {
    const SequencesView sequences = SequencesOfRows(args);
    CheckFirstRows(sequences, args.errors);
    const int sequence = thread < args.rows ? SequenceOf(sequences, thread) : 0;
    // A sequence that begins after its row is recorded above.
    if (thread < args.rows && FirstRow(sequences, sequence) <= thread) {
      CheckPosition(sequences, sequence, thread, args.errors);
    }
  }
  auto* const rotations = reinterpret_cast<float2*>(Memory() + args.shared.rotations);
  const int position = Tables{args}.Scratch().position;
  for (int i = args.pairs + thread; i < (FixedRows().earlier + 1) * args.pairs;
       i += kPersistentThreads) {
    const int back = QuotientOf(i, args.pairs);
    RotationOf(args.frequencies[i - back * args.pairs], int64_t{position} - back,
               args.rotary_factor, &rotations[i].x, &rotations[i].y);
  }
}

/// Begins to copy the CTA's schedules. Called by all threads that compute.
MARLIN_DEVICE void CopySchedules(const PersistentArguments& args) {
  const auto* const schedules = reinterpret_cast<const uint4*>(
      args.schedules + static_cast<int64_t>(blockIdx.x) * args.schedule_bytes);
  for (int i = static_cast<int>(threadIdx.x); i < args.schedule_bytes / 16;
       i += kPersistentThreads) {
    CopyAsync16(SharedAddress(Memory()) + args.shared.schedules + i * 16, schedules + i, 16);
  }
}

/// The start of a run between attentions: the schedules, and leave to fill the rings. Called by all
/// threads that compute, after FindParts.
MARLIN_DEVICE void BeginBetween(const PersistentArguments& args) {
  CopySchedules(args);
  WaitForAllCopies();
  SyncFirst<kPersistentThreads>();
  AllowCopies(Phase::kQkv);
  AllowCopies(Phase::kOut);
}

/// The rotations of the CTA's position, its schedules, and, after FindKeys, the pages of its keys.
/// Called by all threads that compute; others may read everything then.
template <PersistentForm kForm>
MARLIN_DEVICE void BeginTables(const PersistentArguments& args) {
  const auto thread = static_cast<int>(threadIdx.x);
  auto* const rotations = reinterpret_cast<float2*>(Memory() + args.shared.rotations);
  const int position = Tables{args}.Scratch().position;
  for (int pair = thread; pair < args.pairs; pair += kPersistentThreads) {
    RotationOf(args.frequencies[pair], position, args.rotary_factor, &rotations[pair].x,
               &rotations[pair].y);
  }
  if (blockIdx.x == 0 && thread < args.rows) CheckPosition(args, args.position[thread]);
  CopySchedules(args);
  WaitForAllCopies();
  SyncFirst<kPersistentThreads>();
  FindFirstPages<kForm>(args);
  SyncFirst<kPersistentThreads>();
}

}  // namespace marlin::cuda
