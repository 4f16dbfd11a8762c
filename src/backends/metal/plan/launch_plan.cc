#include "backends/metal/plan/launch_plan.h"

#include <algorithm>
#include <array>

#include "backends/metal/gemm/strip_layout.h"
#include "base/checked.h"

namespace marlin::metal {
namespace {

using kernels::kBlockK;
using kernels::kChunkK;
using kernels::kLanes;
using kernels::kStripOutputs;

constexpr std::string_view kStagedSource = "gemm_staged.metal";
constexpr int64_t kTile = 64;
/// Threadgroups per core that keep it busy: unmeasured.
constexpr int64_t kGroupsOfCore = 8;
/// Shorter splits cost more to reduce than their parallelism gains: unmeasured.
constexpr int64_t kLeastChunksOfSplit = 2;
/// Strips that keep every core busy with four simdgroups each: unmeasured.
constexpr int64_t kManyStrips = 512;
/// Maximum splits: marlin_finish adds them sequentially and the error models count them.
constexpr int64_t kMostSplits = 16;

uint32_t Count(int64_t count) { return static_cast<uint32_t>(count); }

int64_t Chunks(const GemmDesc& desc) { return CeilDivide(desc.k, int64_t{kChunkK}); }

/// Whether the gate and up halves of n are whole strips. The same threads can then accumulate both
/// and apply the epilogue.
bool CanPair(const GemmDesc& desc) { return desc.gated && desc.n % (2 * kStripOutputs) == 0; }

LaunchPlan PlanGemv(const GemmDesc& desc) {
  const bool paired = CanPair(desc);
  const int64_t strips = CeilDivide(desc.n, int64_t{kStripOutputs});
  // One function per power of two.
  constexpr std::array<std::string_view, 5> kFunctions = {
      "marlin_gemv_1", "marlin_gemv_2", "marlin_gemv_4", "marlin_gemv_8", "marlin_gemv_16"};
  // With two strips, more rows have too many sums for the registers.
  constexpr std::array<std::string_view, 3> kTwoStrips = {"marlin_gemv_1x2", "marlin_gemv_2x2",
                                                          "marlin_gemv_4x2"};
  size_t rows_log2 = 0;
  while (int64_t{1} << rows_log2 < std::min(desc.m, kGemvRows)) ++rows_log2;
  const int64_t rows = int64_t{1} << rows_log2;
  LaunchPlan plan;
  plan.source = "gemv.metal";
  plan.rows = rows;
  const int64_t simdgroups = GemvSimdgroups(strips, Chunks(desc), paired);
  // Threadgroups enough for large GPUs.
  const bool two = strips >= (paired ? 2 : 1) * kManyStrips && rows_log2 < kTwoStrips.size();
  plan.function = two ? kTwoStrips[rows_log2] : kFunctions[rows_log2];
  const int64_t groups = two || paired ? CeilDivide(strips, int64_t{2}) : strips;
  plan.threadgroups = {Count(groups), Count(CeilDivide(desc.m, rows)), 1};
  plan.threads = Count((two && paired ? simdgroups / 2 : simdgroups) * kLanes);
  return plan;
}

/// Splits of `chunks` that raise `tiles` threadgroups to at most `wanted`.
int64_t SplitsFor(int64_t tiles, int64_t chunks, int64_t wanted) {
  const int64_t most = std::min(kMostSplits, chunks / kLeastChunksOfSplit);
  return std::clamp<int64_t>(wanted / std::max<int64_t>(tiles, 1), 1, std::max<int64_t>(most, 1));
}

/// Sets splits as even as whole steps allow, and drops splits that would be empty.
void SetSplits(LaunchPlan* plan, int64_t steps, int64_t splits) {
  const int64_t steps_of_split = std::max<int64_t>(CeilDivide(steps, splits), 1);
  plan->steps_of_split = static_cast<int>(steps_of_split);
  plan->splits = static_cast<int>(std::max<int64_t>(CeilDivide(steps, steps_of_split), 1));
}

LaunchPlan PlanSplitK(const GemmDesc& desc, const DeviceShape& device) {
  const int64_t rows = desc.m <= 16 ? 16 : 32;
  const int64_t row_tiles = CeilDivide(desc.m, rows);
  const int64_t column_tiles = CeilDivide(desc.n, kTile);
  LaunchPlan plan;
  plan.source = "gemm_direct.metal";
  plan.rows = rows;
  plan.function = rows == 16 ? "marlin_gemm_direct_16x64" : "marlin_gemm_direct_32x64";
  SetSplits(&plan, Chunks(desc),
            SplitsFor(row_tiles * column_tiles, Chunks(desc), device.cores * kGroupsOfCore));
  plan.threadgroups = {Count(column_tiles), Count(row_tiles), Count(plan.splits)};
  return plan;
}

LaunchPlan PlanFused(const GemmDesc& desc) {
  LaunchPlan plan;
  plan.source = "gemm_direct.metal";
  plan.rows = kTile;
  plan.function = "marlin_gemm_direct_64x64";
  SetSplits(&plan, Chunks(desc), 1);
  plan.threadgroups = {Count(CeilDivide(desc.n, kTile)), Count(CeilDivide(desc.m, kTile)), 1};
  return plan;
}

/// One function per buffer count and activation type.
std::string_view StagedFunction(int buffers, DType type) {
  const bool one = buffers == 1;
  switch (type) {
    case DType::kBf16:
      return one ? "marlin_gemm_staged_1xbf16" : "marlin_gemm_staged_2xbf16";
    case DType::kF16:
      return one ? "marlin_gemm_staged_1xf16" : "marlin_gemm_staged_2xf16";
    default:
      return one ? "marlin_gemm_staged_1xf32" : "marlin_gemm_staged_2xf32";
  }
}

LaunchPlan PlanStaged(const GemmDesc& desc, const DeviceShape& device, int buffers, bool striped) {
  constexpr int kBlocksOfChunk = kChunkK / kBlockK;
  const int64_t tiles = CeilDivide(desc.m, kTile) * CeilDivide(desc.n, kTile);
  const int64_t stripes = device.cores * int64_t{2};
  LaunchPlan plan;
  plan.source = kStagedSource;
  plan.rows = kTile;
  plan.function = StagedFunction(buffers, desc.a_type);
  SetSplits(&plan, Chunks(desc), striped ? SplitsFor(tiles, Chunks(desc), 4 * stripes) : 1);
  plan.steps_of_split *= kBlocksOfChunk;
  const int64_t units = tiles * plan.splits;
  plan.units = static_cast<int>(units);
  plan.units_of_group = striped ? static_cast<int>(CeilDivide(units, stripes)) : 1;
  plan.zeroes = plan.splits > 1 && plan.units_of_group > 1;
  plan.threadgroups = {Count(CeilDivide(units, int64_t{plan.units_of_group})), 1, 1};
  return plan;
}

LaunchPlan PlanSums(std::string_view kernel, const GemmDesc& desc, const DeviceShape& device) {
  if (kernel.starts_with("marlin_gemv")) return PlanGemv(desc);
  if (kernel == "marlin_gemm_split_k") return PlanSplitK(desc, device);
  if (kernel.starts_with("marlin_gemm_fused")) return PlanFused(desc);
  const int buffers = kernel == "marlin_gemm_fp4_single_stage" ? 1 : 2;
  return PlanStaged(desc, device, buffers, kernel == "marlin_gemm_fp4_striped");
}

}  // namespace

int64_t GemvSimdgroups(int64_t strips, int64_t chunks, bool paired) {
  const int64_t of_strip = strips >= kManyStrips || paired ? 4 : 8;
  return std::clamp<int64_t>(chunks, 1, of_strip) * (paired ? 2 : 1);
}

LaunchPlan PlanLaunch(const KernelDesc& kernel, const GemmDesc& desc, const DeviceShape& device) {
  LaunchPlan plan = PlanSums(kernel.name, desc, device);
  const bool can_pair = CanPair(desc) && plan.source != kStagedSource;
  plan.partial = plan.splits > 1 || (desc.gated && !can_pair);
  return plan;
}

int64_t PartialBytes(const LaunchPlan& plan, const GemmDesc& desc) {
  return plan.partial ? plan.splits * desc.m * desc.n * int64_t{sizeof(float)} : 0;
}

}  // namespace marlin::metal
