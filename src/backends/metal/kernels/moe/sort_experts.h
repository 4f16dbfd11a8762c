// SortExperts: a stable counting sort of selections by expert, and the tiles of the experts' GEMMs.
//
//   rank     per block of 256 selections: each one's rank among its expert's, and counts
//            [blocks][experts]
//   scan     one threadgroup: counts become offsets of blocks, then the first slots and tiles of
//   the
//            experts
//   scatter  slot = first slot of the expert + offset of the block + rank; tokens by slot, tiles
//
// Deterministic: every number has a single writer, and there are no atomics. A selection of an
// expert that is not here has no slot, as one of an id that is no expert, the first of which is
// reported in *error as {selection, id}.
// Threadgroup memory: 1,152 bytes. Comparisons per selection: 256.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_MOE_SORT_EXPERTS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_MOE_SORT_EXPERTS_H_

#include "backends/metal/kernels/moe/expert_parameters.h"

namespace marlin {
namespace kernels {

constant constexpr int kSortSimdgroups = kSortThreads / kLanes;

struct SortMemory {
  device const ExpertMatrix* experts;
  device const int* ids;
  device int* ranks;
  device int* counts;
  device int* begin;
  device int2* tiles;
  device int* tokens;
  device int* slot_of;
  device int2* error;
};

/// Threadgroup memory of a sort.
struct SortScratch {
  int chosen[kSortThreads];
  int3 of_simdgroup[kSortSimdgroups];
};

static inline int SortBlocks(ExpertParameters p) {
  return (p.tokens * p.top_k + kSortThreads - 1) / kSortThreads;
}

/// The id of a selection, or -1 if no expert here is selected.
static inline int PresentExpert(SortMemory memory, int selection, ExpertParameters p) {
  const int id = memory.ids[selection];
  if (id < 0 || id >= p.experts) return -1;
  return memory.experts[id * kExpertParts + kPartDown].kind == kNoKind ? -1 : id;
}

/// The least of a value over the threadgroup, for its first simdgroup.
static METAL_FUNC int LeastOfThreads(threadgroup SortScratch* scratch, ushort thread_index,
                                     int value) {
  const int least = metal::simd_min(value);
  if (thread_index % kLanes == 0) scratch->of_simdgroup[thread_index / kLanes].x = least;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  const ushort lane = thread_index % kLanes;
  return metal::simd_min(lane < kSortSimdgroups ? scratch->of_simdgroup[lane].x : kNoSelection);
}

static METAL_FUNC void RankSelections(SortMemory memory, threadgroup SortScratch* scratch,
                                      int block, ushort thread_index, ExpertParameters p) {
  const int selection = block * kSortThreads + thread_index;
  const bool exists = selection < p.tokens * p.top_k;
  const int id = exists ? PresentExpert(memory, selection, p) : -1;
  const bool wrong = exists && (memory.ids[selection] < 0 || memory.ids[selection] >= p.experts);
  scratch->chosen[thread_index] = id;
  device int* const counts = memory.counts + long(block) * p.experts;
  for (int e = thread_index; e < p.experts; e += kSortThreads) counts[e] = 0;
  const int first_wrong = LeastOfThreads(scratch, thread_index, wrong ? selection : kNoSelection);
  if (thread_index == 0) {
    memory.counts[long(SortBlocks(p)) * p.experts + block] = first_wrong;
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup | metal::mem_flags::mem_device);
  int before = 0;
  int after = 0;
  for (int other = 0; other < kSortThreads; ++other) {
    if (scratch->chosen[other] != id) continue;
    before += other < thread_index ? 1 : 0;
    after += other > thread_index ? 1 : 0;
  }
  if (exists) memory.ranks[selection] = before;
  // The last one of its expert knows how many there are.
  if (id >= 0 && after == 0) counts[id] = before + 1;
}

/// Turns the counts of an expert into offsets of the blocks, and returns their sum.
static inline int OffsetsOfBlocks(SortMemory memory, int expert, ExpertParameters p) {
  int sum = 0;
  const int blocks = SortBlocks(p);
  for (int block = 0; block < blocks; ++block) {
    device int* const count = memory.counts + long(block) * p.experts + expert;
    const int counted = *count;
    *count = sum;
    sum += counted;
  }
  return sum;
}

/// Rows, GEMV tiles and GEMM tiles of an expert.
static inline int3 RowsAndTiles(int rows, ExpertParameters p) {
  const bool few = rows <= p.most_few_rows;
  const int tile_rows = few ? p.few_tile_rows : p.many_tile_rows;
  const int tiles = (rows + tile_rows - 1) / tile_rows;
  return int3(rows, few ? tiles : 0, few ? 0 : tiles);
}

/// One threadgroup takes 256 experts at a time, and carries the sums on.
static METAL_FUNC void ScanExperts(SortMemory memory, threadgroup SortScratch* scratch,
                                   ushort thread_index, ExpertParameters p) {
  const ushort simdgroup = thread_index / kLanes;
  const int ends = p.experts + 2;
  int3 carried = int3(0);
  for (int first = 0; first < ends; first += kSortThreads) {
    const int e = first + thread_index;
    int rows = 0;
    if (e < p.experts) rows = OffsetsOfBlocks(memory, e, p);
    if (e == p.experts && p.shared != kNoShared) rows = p.tokens;
    const int3 count = RowsAndTiles(rows, p);
    const int3 before =
        int3(metal::simd_prefix_exclusive_sum(count.x), metal::simd_prefix_exclusive_sum(count.y),
             metal::simd_prefix_exclusive_sum(count.z));
    if (thread_index % kLanes == kLanes - 1) scratch->of_simdgroup[simdgroup] = before + count;
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    int3 sum = carried;
    for (int i = 0; i < kSortSimdgroups; ++i) {
      if (i < simdgroup) sum += scratch->of_simdgroup[i];
      carried += scratch->of_simdgroup[i];
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (e >= ends) continue;
    sum += before;
    memory.begin[e] = sum.x;
    memory.begin[ends + e] = sum.y;
    memory.begin[2 * ends + e] = sum.z;
  }
}

static METAL_FUNC void ReportWrongSelection(SortMemory memory, threadgroup SortScratch* scratch,
                                            ushort thread_index, ExpertParameters p) {
  const int blocks = SortBlocks(p);
  int first = kNoSelection;
  for (int block = thread_index; block < blocks; block += kSortThreads) {
    first = metal::min(first, memory.counts[long(blocks) * p.experts + block]);
  }
  first = LeastOfThreads(scratch, thread_index, first);
  if (thread_index != 0) return;
  *memory.error = int2(first, first == kNoSelection ? 0 : memory.ids[first]);
}

/// Tile number `tile` of those that begin at first_tiles[expert], [experts + 2].
static inline int2 TileAt(device const int* first_tiles, int tile, int tile_rows, int experts) {
  if (tile >= first_tiles[experts + 1]) return int2(-1, 0);
  // The last expert whose first tile is not beyond this one has it.
  int expert = 0;
  int end = experts + 1;
  while (expert + 1 < end) {
    const int middle = expert + (end - expert) / 2;
    if (first_tiles[middle] <= tile) {
      expert = middle;
    } else {
      end = middle;
    }
  }
  return int2(expert, (tile - first_tiles[expert]) * tile_rows);
}

/// The part of thread `thread_index` of `threads`.
static METAL_FUNC void ScatterSelections(SortMemory memory, int thread_index, int threads,
                                         ExpertParameters p) {
  const int ends = p.experts + 2;
  const int selections = p.tokens * p.top_k;
  for (int i = thread_index; i < selections; i += threads) {
    const int id = PresentExpert(memory, i, p);
    int slot = -1;
    if (id >= 0) {
      slot = memory.begin[id] + memory.ranks[i] +
             memory.counts[long(i / kSortThreads) * p.experts + id];
      memory.tokens[slot] = i / p.top_k;
    }
    memory.slot_of[i] = slot;
  }
  if (p.shared != kNoShared) {
    for (int t = thread_index; t < p.tokens; t += threads) {
      memory.tokens[memory.begin[p.experts] + t] = t;
    }
  }
  for (int tile = thread_index; tile < p.few_tiles; tile += threads) {
    memory.tiles[tile] = TileAt(memory.begin + ends, tile, p.few_tile_rows, p.experts);
  }
  for (int tile = thread_index; tile < p.many_tiles; tile += threads) {
    memory.tiles[p.few_tiles + tile] =
        TileAt(memory.begin + 2 * ends, tile, p.many_tile_rows, p.experts);
  }
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_MOE_SORT_EXPERTS_H_
