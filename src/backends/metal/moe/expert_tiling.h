// How the rows of a layer's experts are divided into tiles: pure functions of the problem and the
// device. Routing is known to the device only, so grids have room for every routing. The best sizes
// for each GPU have not been measured.
#pragma once

#include <cstdint>

#include "backends/metal/gemm/row_parts.h"
#include "backends/metal/kernels/moe/expert_parameters.h"
#include "backends/metal/runtime/driver.h"
#include "plan/moe/experts.h"

namespace marlin::metal {

/// A part of the tokens that one command buffer runs.
struct ExpertPass {
  int64_t tokens = 0;
  int64_t top_k = 0;
  int64_t present = 0;  ///< Experts that are here, without the shared one.
  bool shared = false;
  bool batch_invariant = false;

  int64_t selections() const { return tokens * top_k; }
  int64_t slots() const { return selections() + (shared ? tokens : 0); }
  int64_t sort_blocks() const {
    return (selections() + kernels::kSortThreads - 1) / kernels::kSortThreads;
  }
};

/// Experts with up to `most_few_rows` rows have tiles for the GEMV, the others for the GEMM.
struct ExpertTiling {
  int64_t most_few_rows = 0;
  int64_t few_tile_rows = 1;
  int64_t many_tile_rows = 64;
  int64_t few_tiles = 0;  ///< The most that there can be.
  int64_t many_tiles = 0;
};

ExpertTiling TileExperts(const ExpertPass& pass, const DeviceShape& device);

/// Bounds of a pass of more than one token.
struct PassLimits {
  int64_t workspace_bytes = int64_t{1} << 28;  ///< Rows enough for whole tiles in large layers.
  int64_t operations = kMostOperationsOfPart;
};

/// Tokens per pass, at least 1. `inner_stride` as in ExpertTable.
int64_t TokensOfPass(const ExpertsProblem& problem, const LayerExperts& layer, int64_t inner_stride,
                     const PassLimits& limits);

}  // namespace marlin::metal
