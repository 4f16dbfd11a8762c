// Sorting selections by expert, on the device: a counting sort in one CTA. Every warp counts and
// then places a run of adjacent selections, so the sort is stable.
#include "backends/cuda/kernels/common/async_copy.cuh"
#include "backends/cuda/kernels/common/block_scan.cuh"
#include "backends/cuda/kernels/common/launch.h"
#include "backends/cuda/kernels/experts/experts_kernels.h"

namespace marlin::cuda {
namespace {

constexpr unsigned kAll = 0xffffffffU;
/// Loads in flight per lane.
constexpr int kAtOnce = 4;

/// A warp's run of selections, 32 x kAtOnce at a time.
class SelectionRun {
 public:
  MARLIN_DEVICE SelectionRun(const SortArguments& args, int warp, int lane)
      : args_(args), lane_(lane) {
    const int64_t selections = static_cast<int64_t>(args.tokens) * args.top_k;
    const int64_t per_warp = (selections + args.warps - 1) / args.warps;
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

/// Replaces the warps' counts of every expert by where each warp's slots begin, and stores the
/// first slot of every expert.
MARLIN_DEVICE void ScanCounts(const SortArguments& args, int32_t* counts, int32_t* warp_sums) {
  const int experts = args.slots.experts;
  const int threads = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int per_thread = (experts + threads - 1) / threads;
  const int first = min(thread * per_thread, experts);
  const int end = min(first + per_thread, experts);
  int mine = 0;
  for (int e = first; e < end; ++e) {
    for (int w = 0; w < args.warps; ++w) mine += counts[w * experts + e];
  }
  int slot = SumBefore(mine, warp_sums);
  for (int e = first; e < end; ++e) {
    args.slots.begin[e] = slot;
    for (int w = 0; w < args.warps; ++w) {
      const int count = counts[w * experts + e];
      counts[w * experts + e] = slot;
      slot += count;
    }
  }
  if (thread == threads - 1) {
    args.slots.begin[experts] = slot;
    args.slots.begin[experts + 1] = slot + (args.shared ? args.tokens : 0);
    warp_sums[kMaxSortWarps] = slot;
  }
  __syncthreads();
}

MARLIN_DEVICE void ReportSelection(const SortArguments& args, int selection) {
  ValueRecord& record = *args.errors.record;
  if (atomicCAS(&record.bad_selection, 0, 1) != 0) return;
  record.token = selection / args.top_k;
  record.selection = selection % args.top_k;
  record.id = args.ids[selection];
  record.experts = args.slots.experts;
  *args.errors.any = 1;
}

__global__ void __launch_bounds__(kMaxSortWarps * 32)
    SortKernel(const __grid_constant__ SortArguments args) {
  extern __shared__ int32_t counts[];
  const int experts = args.slots.experts;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread >> 5;
  const int lane = thread & 31;
  int32_t* const mine = counts + warp * experts;
  int32_t* const warp_sums = counts + args.warps * experts;
  int32_t& first_bad = warp_sums[kMaxSortWarps + 1];
  for (int i = thread; i < args.warps * experts; i += static_cast<int>(blockDim.x)) counts[i] = 0;
  if (thread == 0) first_bad = 0x7fffffff;
  WaitForEarlierWork();
  TriggerDependentLaunch();
  __syncthreads();
  const SelectionRun run(args, warp, lane);
  run.ForEach(
      [&](int, int expert, bool) {
        const unsigned peers = __match_any_sync(kAll, expert);
        if (expert >= 0 && lane == __ffs(peers) - 1) mine[expert] += __popc(peers);
        __syncwarp();
      },
      [&](int selection) { atomicMin(&first_bad, selection); });
  __syncthreads();
  if (thread == 0 && first_bad != 0x7fffffff) ReportSelection(args, first_bad);
  ScanCounts(args, counts, warp_sums);
  run.ForEach(
      [&](int selection, int expert, bool inside) {
        const unsigned peers = __match_any_sync(kAll, expert);
        const int before = __popc(peers & ((1U << lane) - 1));
        int slot = expert >= 0 ? mine[expert] + before : -1;
        __syncwarp();
        if (expert >= 0 && before == 0) mine[expert] += __popc(peers);
        __syncwarp();
        if (!inside) return;
        args.slots.slot_of[selection] = slot;
        if (slot >= 0) args.slots.token[slot] = selection / args.top_k;
      },
      [](int) {});
  if (!args.shared) return;
  const int routed = warp_sums[kMaxSortWarps];
  for (int t = thread; t < args.tokens; t += static_cast<int>(blockDim.x)) {
    args.slots.token[routed + t] = t;
  }
}

}  // namespace

cudaError_t LoadSort() {
  const auto* const function = reinterpret_cast<const void*>(&SortKernel);
  const cudaError_t error = AllowAllShared(function);
  return error != cudaSuccess ? error : PreferShared(function);
}

cudaError_t LaunchSort(const SortArguments& args, cudaStream_t stream) {
  SortArguments copy = args;
  void* parameters[] = {&copy};
  const LaunchSize size = {dim3(1), args.warps * 32,
                           static_cast<int>(SortBytes(args.slots.experts, args.warps)), true};
  return Launch(reinterpret_cast<const void*>(&SortKernel), size, parameters, stream);
}

}  // namespace marlin::cuda
