// Tiling of GEMMs for the kernels with CTA tiles of 64 tokens x 64 outputs, which are run by name:
// pure functions of the problem and the device.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {

inline constexpr int kBlockTile = 64;      ///< Tokens and outputs of a CTA tile.
inline constexpr int kBlockThreads = 128;  ///< Four warps: 2 along outputs x 2 along tokens or k.
inline constexpr int kStagedStep = 32;     ///< k of a step (k-iteration), weights in shared memory.
inline constexpr int kFusedStep = 64;      ///< The same, weights in registers.

enum class BlockKernel : uint8_t {
  kDoubleBuffered,  ///< marlin_gemm_fp4
  kSingleStage,     ///< marlin_gemm_fp4_single_stage
  kStriped,         ///< marlin_gemm_fp4_striped
  kFused,           ///< marlin_gemm_fused_fp4, marlin_gemm_fused_u4
  kMarlinW4,        ///< marlin_gemm_w4
};
/// The kernel of a row of kernels.def; none for rows of other families.
std::optional<BlockKernel> BlockKernelOf(std::string_view row);

/// Split-K: the work units are slices, along k, of the output tiles. CTA b computes the units
/// [b, b + 1) * units_of_block; unit u is slice u % parallel of tile u / parallel. Tiles are in
/// column-major order, so that adjacent tiles share weights.
struct BlockPlan {
  int token_tiles = 1;
  int parallel = 1;        ///< Slices per tile.
  int steps = 0;           ///< k-iterations, of kStagedStep or kFusedStep, over all of k.
  int steps_of_slice = 0;  ///< The last slice of a tile may have fewer, but at least one.
  int64_t units = 0;
  int64_t units_of_block = 1;
  int grid = 1;
  bool partials = false;  ///< Sums go to the workspace [parallel, m, n] and are reduced afterwards.
};
/// Precondition: m, n > 0, k >= 0.
BlockPlan PlanBlocks(BlockKernel kernel, const TileProblem& problem, const DeviceShape& device);

}  // namespace marlin::cuda
