// How products are cut for the kernels of blocks of 64 tokens x 64 outputs, which are run by name:
// pure functions of the problem and the device.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {

inline constexpr int kBlockTile = 64;      ///< Tokens and outputs of a thread block.
inline constexpr int kBlockThreads = 128;  ///< Four warps: two along outputs, two along tokens.
inline constexpr int kStagedStep = 32;     ///< k of a step where weights lie in shared memory.
inline constexpr int kFusedStep = 64;      ///< And where they do not.

enum class BlockKernel : uint8_t {
  kDoubleBuffered,  ///< marlin_gemm_fp4
  kSingleStage,     ///< marlin_gemm_fp4_single_stage
  kStriped,         ///< marlin_gemm_fp4_striped
  kFused,           ///< marlin_gemm_fused_fp4, marlin_gemm_fused_u4
  kMarlinW4,        ///< marlin_gemm_w4
};
/// The kernel behind a row of kernels.def; none for rows that are no blocks.
std::optional<BlockKernel> BlockKernelOf(std::string_view row);

/// How the tiles of the product are cut into work units: slices of a tile's k. Thread block b takes
/// the units [b, b + 1) * units_of_block; unit u is slice u % parallel of tile u / parallel. Tiles
/// lie column after column: neighbours share weights.
struct BlockPlan {
  int token_tiles = 1;
  int parallel = 1;        ///< Slices of a tile.
  int steps = 0;           ///< Of kStagedStep or kFusedStep, of all of k.
  int steps_of_slice = 0;  ///< The last slice of a tile may have fewer, but has some.
  int64_t units = 0;
  int64_t units_of_block = 1;
  int grid = 1;
  bool partials = false;  ///< Sums go to the workspace [parallel, m, n]; another kernel finishes.
};
/// Precondition: m, n > 0, k >= 0.
BlockPlan PlanBlocks(BlockKernel kernel, const TileProblem& problem, const DeviceShape& device);

}  // namespace marlin::cuda
