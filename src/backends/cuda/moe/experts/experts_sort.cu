// Sorting selections by expert, on the device: a counting sort. Every warp counts and then places a
// run of adjacent selections, so the sort is stable. Few selections are sorted by one CTA; many are
// divided into parts, a CTA for each, after a kernel that counts every part.
#include "backends/cuda/common/block_scan.cuh"
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/moe/experts/experts_kernels.h"
#include "backends/cuda/moe/experts/experts_own_sort.cuh"

namespace marlin::cuda {
namespace {

constexpr unsigned kAll = 0xffffffffU;
/// Loads in flight per lane.
constexpr int kAtOnce = 4;

/// A warp's run of selections, 32 x kAtOnce at a time.
class SelectionRun {
 public:
  /// `warp`: of all parts.
  MARLIN_DEVICE SelectionRun(const SortArguments& args, int warp, int lane)
      : args_(args), lane_(lane) {
    const int64_t selections = static_cast<int64_t>(args.tokens) * args.top_k;
    const int warps = args.parts * args.warps;
    const int64_t per_warp = (selections + warps - 1) / warps;
    first_ = min(warp * per_warp, selections);
    end_ = min(first_ + per_warp, selections);
  }

  /// Calls visit(selection, expert) for 32 adjacent selections at a time, in order; expert -1: not
  /// on this device, or no expert at all, which is `report`ed.
  template <typename Visit, typename Report>
  MARLIN_DEVICE void ForEach(const Visit& visit, const Report& report) const {
#pragma unroll 1
    for (int64_t from = first_; from < end_; from += 32 * kAtOnce) {
      int ids[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t at = from + i * 32 + lane_;
        ids[i] = at < end_ ? args_.ids[at] : 0;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t at = from + i * 32 + lane_;
        const bool inside = at < end_;
        const bool valid = ids[i] >= 0 && ids[i] < args_.slots.experts;
        if (inside && !valid) report(static_cast<int>(at));
        const bool here = inside && valid && args_.present[ids[i]] != 0;
        visit(static_cast<int>(at), here ? ids[i] : -1, inside);
      }
    }
  }

 private:
  const SortArguments& args_;
  int lane_;
  int64_t first_;
  int64_t end_;
};

constexpr int kNoneBad = 0x7fffffff;

/// Dynamic shared memory of a CTA.
struct SortMemory {
  int32_t* counts;     ///< [warps][experts]
  int32_t* warp_sums;  ///< [kMaxSortWarps]
  int32_t* routed;     ///< Slots of all experts but the shared one.
  int32_t* first_bad;  ///< The first selection of no expert, or kNoneBad.

  MARLIN_DEVICE SortMemory(const SortArguments& args, int32_t* memory)
      : counts(memory),
        warp_sums(memory + args.warps * args.slots.experts),
        routed(warp_sums + kMaxSortWarps),
        first_bad(routed + 1) {}
};

MARLIN_DEVICE int Part() { return static_cast<int>(blockIdx.x); }

/// Counts this CTA's selections, per warp and expert, when earlier work is done, unless their ids
/// were there `early`.
MARLIN_DEVICE SelectionRun CountSelections(const SortArguments& args, const SortMemory& memory,
                                           bool early) {
  const int experts = args.slots.experts;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread >> 5;
  const int lane = thread & 31;
  for (int i = thread; i < args.warps * experts; i += static_cast<int>(blockDim.x)) {
    memory.counts[i] = 0;
  }
  if (thread == 0) *memory.first_bad = kNoneBad;
  if (!early) {
    WaitForEarlierWork();
    TriggerDependentLaunch();
  }
  __syncthreads();
  int32_t* const mine = memory.counts + warp * experts;
  const SelectionRun run(args, Part() * args.warps + warp, lane);
  run.ForEach(
      [&](int, int expert, bool) {
        const unsigned peers = __match_any_sync(kAll, expert);
        if (expert >= 0 && lane == __ffs(peers) - 1) mine[expert] += __popc(peers);
        __syncwarp();
      },
      [&](int selection) { atomicMin(memory.first_bad, selection); });
  __syncthreads();
  return run;
}

/// Counts of warps that are read together.
constexpr int kWarpsAtOnce = 8;

/// An expert's selections in all warps.
MARLIN_DEVICE int SumOfWarps(const SortArguments& args, const int32_t* counts, int expert) {
  int sum = 0;
#pragma unroll kWarpsAtOnce
  for (int w = 0; w < args.warps; ++w) sum += counts[w * args.slots.experts + expert];
  return sum;
}

/// Replaces an expert's counts by the first slots of every warp, of which `next` is the first.
MARLIN_DEVICE void ReplaceBySlots(const SortArguments& args, int32_t* counts, int expert,
                                  int next) {
  const int experts = args.slots.experts;
  for (int from = 0; from < args.warps; from += kWarpsAtOnce) {
    int32_t* const of_warps = counts + from * experts + expert;
    int of[kWarpsAtOnce];
#pragma unroll
    for (int w = 0; w < kWarpsAtOnce; ++w) {
      of[w] = from + w < args.warps ? of_warps[w * experts] : 0;
    }
#pragma unroll
    for (int w = 0; w < kWarpsAtOnce; ++w) {
      if (from + w < args.warps) of_warps[w * experts] = next;
      next += of[w];
    }
  }
}

/// An expert's selections in all parts, and in those before this one.
struct ExpertCount {
  int all = 0;
  int before = 0;
};

MARLIN_DEVICE ExpertCount CountOf(const SortArguments& args, const int32_t* counts, int expert) {
  const int experts = args.slots.experts;
  ExpertCount count;
  if (args.parts == 1) {
    count.all = SumOfWarps(args, counts, expert);
    return count;
  }
#pragma unroll 16
  for (int p = 0; p < args.parts; ++p) {
    const int there = args.part_counts[p * (experts + 1) + expert];
    count.all += there;
    count.before += p < Part() ? there : 0;
  }
  return count;
}

/// Replaces the warps' counts of every expert by where each warp's slots begin; the first part
/// stores the first slot of every expert.
MARLIN_DEVICE void ScanCounts(const SortArguments& args, const SortMemory& memory) {
  const int experts = args.slots.experts;
  const int threads = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int per_thread = (experts + threads - 1) / threads;
  const int first = min(thread * per_thread, experts);
  const int end = min(first + per_thread, experts);
  // A thread mostly has one expert, or none.
  ExpertCount of_first;
  if (first < end) of_first = CountOf(args, memory.counts, first);
  int mine = of_first.all;
  for (int e = first + 1; e < end; ++e) mine += CountOf(args, memory.counts, e).all;
  int slot = SumBefore(mine, memory.warp_sums);
  for (int e = first; e < end; ++e) {
    const ExpertCount count = e == first ? of_first : CountOf(args, memory.counts, e);
    if (Part() == 0) args.slots.begin[e] = slot;
    ReplaceBySlots(args, memory.counts, e, slot + count.before);
    slot += count.all;
  }
  if (thread == threads - 1) {
    *memory.routed = slot;
    if (Part() == 0) {
      args.slots.begin[experts] = slot;
      args.slots.begin[experts + 1] = slot + (args.shared ? args.tokens : 0);
    }
  }
  __syncthreads();
}

/// Called by one thread of the first part.
MARLIN_DEVICE void ReportFirstBad(const SortArguments& args, int first_bad) {
  for (int p = 0; args.parts > 1 && p < args.parts; ++p) {
    first_bad = min(first_bad, args.part_counts[(p + 1) * (args.slots.experts + 1) - 1]);
  }
  if (first_bad == kNoneBad) return;
  RecordBadSelection(args.errors, args.ids, args.top_k, args.slots.experts, first_bad);
}

/// Counts the selections of every part, where there are several.
__global__ void __launch_bounds__(kMaxSortWarps * 32)
    CountKernel(const __grid_constant__ SortArguments args) {
  extern __shared__ int32_t shared[];
  const SortMemory memory(args, shared);
  CountSelections(args, memory, false);
  const int experts = args.slots.experts;
  int32_t* const to = args.part_counts + Part() * (experts + 1);
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x)) {
    to[e] = SumOfWarps(args, memory.counts, e);
  }
  if (threadIdx.x == 0) to[experts] = *memory.first_bad;
}

__global__ void __launch_bounds__(kMaxSortWarps * 32)
    SortKernel(const __grid_constant__ SortArguments args) {
  extern __shared__ int32_t shared[];
  const SortMemory memory(args, shared);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread & 31;
  int32_t* const mine = memory.counts + (thread >> 5) * args.slots.experts;
  // The counting kernel lets this one begin when it has waited for the ids.
  const bool early = args.parts > 1;
  const SelectionRun run = CountSelections(args, memory, early);
  if (early) {
    WaitForEarlierWork();
    TriggerDependentLaunch();
  }
  if (thread == 0 && Part() == 0) ReportFirstBad(args, *memory.first_bad);
  ScanCounts(args, memory);
  run.ForEach(
      [&](int selection, int expert, bool inside) {
        const unsigned peers = __match_any_sync(kAll, expert);
        const int before = __popc(peers & ((1U << lane) - 1));
        const int slot = expert >= 0 ? mine[expert] + before : -1;
        __syncwarp();
        if (expert >= 0 && before == 0) mine[expert] += __popc(peers);
        __syncwarp();
        if (!inside) return;
        args.slots.slot_of[selection] = slot;
        if (slot >= 0) args.slots.token[slot] = selection / args.top_k;
      },
      [](int) {});
  if (!args.shared) return;
  const auto threads = static_cast<int>(blockDim.x);
  for (int t = Part() * threads + thread; t < args.tokens; t += args.parts * threads) {
    args.slots.token[*memory.routed + t] = t;
  }
}

cudaError_t LoadKernel(const void* function) {
  const cudaError_t error = AllowAllShared(function);
  return error != cudaSuccess ? error : PreferShared(function);
}

}  // namespace

cudaError_t LoadSort() {
  const cudaError_t error = LoadKernel(reinterpret_cast<const void*>(&CountKernel));
  return error != cudaSuccess ? error : LoadKernel(reinterpret_cast<const void*>(&SortKernel));
}

cudaError_t LaunchSort(const SortArguments& args, cudaStream_t stream) {
  const dim3 parts(static_cast<unsigned>(args.parts));
  const auto bytes = static_cast<int>(SortBytes(args.slots.experts, args.warps));
  if (args.parts > 1) {
    const cudaError_t error =
        LaunchInChain(&CountKernel, parts, args.warps * 32, bytes, stream, args);
    if (error != cudaSuccess) return error;
  }
  return LaunchInChain(&SortKernel, parts, args.warps * 32, bytes, stream, args);
}

}  // namespace marlin::cuda
