#include "backends/metal/moe/expert_tiling.h"

#include <algorithm>
#include <limits>

#include "backends/metal/plan/launch_plan.h"
#include "base/checked.h"

namespace marlin::metal {

ExpertTiling TileExperts(const ExpertPass& pass, const DeviceShape& device) {
  const int64_t selections = pass.selections();
  const int64_t experts = std::min(pass.present, selections);
  // Rows of an expert, if the router is fair.
  const int64_t mean = CeilDivide(selections, std::max<int64_t>(pass.present, 1));
  ExpertTiling tiling;
  // The GEMM kernel decodes into matrix fragments and adds in another order than the GEMV.
  const bool gemv_only = pass.batch_invariant || !device.known_fragments;
  tiling.most_few_rows = gemv_only ? std::numeric_limits<int32_t>::max() : kGemvRows;
  // Some experts have twice the mean: rows of a tile without a token cost less than a second tile.
  const int64_t rows = pass.tokens == 1 ? 1 : std::min(2 * mean, kGemvRows);
  while (tiling.few_tile_rows < rows) tiling.few_tile_rows *= 2;
  tiling.many_tile_rows = mean <= 32 ? 32 : 64;

  // The sum of ceil(rows / tile) is at most the sum of rows / tile, plus 1 for each expert.
  const auto tiles_of = [](int64_t all_rows, int64_t tile, int64_t of_experts) {
    return std::min(all_rows, all_rows / tile + of_experts);
  };
  tiling.few_tiles = tiles_of(selections, tiling.few_tile_rows, experts);
  if (pass.shared && pass.tokens <= tiling.most_few_rows) {
    tiling.few_tiles += CeilDivide(pass.tokens, tiling.few_tile_rows);
  }
  if (selections <= tiling.most_few_rows) return tiling;
  tiling.many_tiles = tiles_of(selections, tiling.many_tile_rows,
                               std::min(experts, selections / (tiling.most_few_rows + 1)));
  if (pass.shared && pass.tokens > tiling.most_few_rows) {
    tiling.many_tiles += CeilDivide(pass.tokens, tiling.many_tile_rows);
  }
  return tiling;
}

int64_t TokensOfPass(const ExpertsProblem& problem, const LayerExperts& layer, int64_t inner_stride,
                     const PassLimits& limits) {
  const int64_t rows = problem.top_k + (layer.shared.present() ? 1 : 0);
  int64_t inner = layer.shared.inner();
  for (const ExpertOperands& expert : layer.experts) inner = std::max(inner, expert.inner());
  const int64_t bytes =
      SaturatingProduct(rows * int64_t{sizeof(float)}, inner_stride + layer.hidden);
  const int64_t operations =
      SaturatingProduct(6 * rows * layer.hidden, std::max<int64_t>(inner, 1));
  const int64_t most = std::min(limits.workspace_bytes / bytes, limits.operations / operations);
  return std::clamp<int64_t>(most, 1, problem.tokens);
}

}  // namespace marlin::metal
