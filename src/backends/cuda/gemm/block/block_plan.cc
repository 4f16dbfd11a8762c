// Tiling of GEMMs into CTA tiles of 64 x 64 and split-K slices.
#include "backends/cuda/gemm/block/block_plan.h"

#include <array>
#include <utility>

#include "backends/cuda/plan/kernel_family.h"
#include "base/checked.h"

namespace marlin::cuda {
namespace {

/// CTAs of the striped kernel per multiprocessor.
constexpr int kStripesOfMultiprocessor = 4;
/// Shorter slices cost more to reduce than the parallelism saves.
constexpr int kLeastStepsOfSlice = 8;
/// Cost of storing and reducing one partial sum, in k-iterations of a CTA.
constexpr int64_t kStepsOfPartial = 4;

int SliceSteps(int steps, int parallel) { return (steps + parallel - 1) / parallel; }

/// The number of slices per tile that minimizes the work of the longest stripe.
int ChooseParallel(int64_t tiles, int steps, int64_t stripes) {
  int best = 1;
  int64_t best_cost = CeilDivide(tiles, stripes) * steps;
  for (int parallel = 2; parallel * kLeastStepsOfSlice <= steps; ++parallel) {
    // More than four units per stripe only enlarge the workspace.
    if (tiles * parallel > 4 * stripes) break;
    const int64_t units = CeilDivide(tiles * parallel, stripes);
    const int64_t cost = units * SliceSteps(steps, parallel) + kStepsOfPartial * parallel;
    if (cost < best_cost) {
      best = parallel;
      best_cost = cost;
    }
  }
  return best;
}

}  // namespace

std::optional<BlockKernel> BlockKernelOf(std::string_view row) {
  constexpr std::array<std::pair<std::string_view, BlockKernel>, 6> kRows = {{
      {"marlin_gemm_fp4", BlockKernel::kDoubleBuffered},
      {"marlin_gemm_fp4_single_stage", BlockKernel::kSingleStage},
      {"marlin_gemm_fp4_striped", BlockKernel::kStriped},
      {"marlin_gemm_fused_fp4", BlockKernel::kFused},
      {"marlin_gemm_fused_u4", BlockKernel::kFused},
      {"marlin_gemm_w4", BlockKernel::kMarlinW4},
  }};
  for (const auto& [name, kernel] : kRows) {
    if (name == row) return kernel;
  }
  return std::nullopt;
}

BlockPlan PlanBlocks(BlockKernel kernel, const TileProblem& problem, const DeviceShape& device) {
  const bool fused = kernel == BlockKernel::kFused || kernel == BlockKernel::kMarlinW4;
  const int step = fused ? kFusedStep : kStagedStep;
  BlockPlan plan;
  plan.steps = static_cast<int>(CeilDivide(int64_t{problem.k}, int64_t{step}));
  plan.token_tiles = static_cast<int>(CeilDivide(int64_t{problem.m}, int64_t{kBlockTile}));
  const int64_t tiles = plan.token_tiles * CeilDivide(int64_t{problem.n}, int64_t{kBlockTile});
  const int64_t stripes = int64_t{device.multiprocessors} * kStripesOfMultiprocessor;
  const bool striped = kernel == BlockKernel::kStriped;
  // A row's sums must not depend on m.
  if (striped && !problem.batch_invariant) {
    plan.parallel = ChooseParallel(tiles, plan.steps, stripes);
  }
  plan.steps_of_slice = SliceSteps(plan.steps, plan.parallel);
  if (plan.steps_of_slice > 0) plan.parallel = SliceSteps(plan.steps, plan.steps_of_slice);
  plan.units = tiles * plan.parallel;
  if (striped) plan.units_of_block = CeilDivide(plan.units, stripes);
  plan.grid = static_cast<int>(CeilDivide(plan.units, plan.units_of_block));
  plan.partials = plan.parallel > 1 || problem.gated;
  return plan;
}

namespace {

/// These kernels run by name, or are the only ones that read their weights: the estimate is never
/// compared with another.
double BlockMicroseconds(const GemmDesc& desc, const DeviceShape& /*device*/) {
  return static_cast<double>(desc.m) * static_cast<double>(desc.n) * static_cast<double>(desc.k);
}

}  // namespace

const KernelFamily& BlockFamily() {
  static constexpr KernelFamily kFamily = {BlockMicroseconds, nullptr, nullptr, true};
  return kFamily;
}

Support SupportsFp4(const GemmDesc& desc, const DeviceProperties& /*device*/) {
  if (desc.format != Format::kFp4E2M1) return {"takes fp4_e2m1 alone"};
  return SupportsTiles(desc);
}

Support SupportsInt4(const GemmDesc& desc, const DeviceProperties& /*device*/) {
  if (desc.format != Format::kU4 && desc.format != Format::kS4) return {"takes u4 and s4 alone"};
  return SupportsTiles(desc);
}

Support SupportsMarlinW4(const GemmDesc& desc, const DeviceProperties& /*device*/) {
  if (!desc.weights.marlin_w4) return {"takes weights that were prepared in the marlin_w4 layout"};
  // Its operands are the same as with the tiled layout.
  GemmDesc in_tiles = desc;
  in_tiles.weights.tiled = true;
  in_tiles.weights.marlin_w4 = false;
  return SupportsTiles(in_tiles);
}

}  // namespace marlin::cuda
