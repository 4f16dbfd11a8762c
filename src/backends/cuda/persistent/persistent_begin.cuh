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
MARLIN_DEVICE void FindKeys(const PersistentArguments& args, int teams) {
  PersistentScratch& scratch = Tables{args}.Scratch();
  for (int group = 0; group < kMostCacheGroups; ++group) {
    if (!HasKeys(args, group)) continue;
    scratch.attention[group] = PartOf(args, group, scratch.position, teams);
  }
}

/// The pages of the CTA's first keys and of the new one.
MARLIN_DEVICE void FindFirstPages(const PersistentArguments& args, int teams) {
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread > teams) return;
  PersistentScratch& scratch = Tables{args}.Scratch();
  for (int group = 0; group < kMostCacheGroups; ++group) {
    if (!HasKeys(args, group)) continue;
    AttentionPart& part = scratch.attention[group];
    const int block = thread < teams ? part.first_block + thread : scratch.position / kWarpKeys;
    if (block < part.first_block || block >= part.end_block) continue;
    uint8_t* const page = FindPage(args, group, block * kWarpKeys);
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

/// The rotations of the CTA's position, its schedules, and, after FindKeys, the pages of its keys.
/// Called by all threads that compute; others may read everything then.
MARLIN_DEVICE void BeginTables(const PersistentArguments& args, int teams) {
  const auto thread = static_cast<int>(threadIdx.x);
  auto* const rotations = reinterpret_cast<float2*>(Memory() + args.shared.rotations);
  const int position = Tables{args}.Scratch().position;
  for (int pair = thread; pair < args.pairs; pair += kPersistentThreads) {
    RotationOf(args.frequencies[pair], position, args.rotary_factor, &rotations[pair].x,
               &rotations[pair].y);
  }
  if (blockIdx.x == 0 && thread < args.rows) CheckPosition(args, args.position[thread]);
  const auto* const schedules = reinterpret_cast<const uint4*>(
      args.schedules + static_cast<int64_t>(blockIdx.x) * args.schedule_bytes);
  for (int i = thread; i < args.schedule_bytes / 16; i += kPersistentThreads) {
    CopyAsync16(SharedAddress(Memory()) + args.shared.schedules + i * 16, schedules + i, 16);
  }
  WaitForAllCopies();
  SyncFirst<kPersistentThreads>();
  FindFirstPages(args, teams);
  SyncFirst<kPersistentThreads>();
}

}  // namespace marlin::cuda
