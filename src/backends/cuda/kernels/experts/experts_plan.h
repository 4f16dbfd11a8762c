// Plans the GEMV launches of a layer's experts: a pure function of the problem and the device.
#pragma once

#include <cstdint>
#include <optional>

#include "backends/cuda/kernels/experts/experts_layout.h"
#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {

/// The matrices of one launch.
struct ExpertGemvProblem {
  TileView weights;
  CodeKind kind = CodeKind::kFp4;
  int64_t experts = 0;  ///< Without the shared one.
  int sides = 1;
  int64_t rows_per_expert = 1;  ///< On average.
};

struct ExpertGemvPlan {
  ExpertGemvArguments arguments;  ///< Without table, slots, rows and out.
  int octets = 1;
  int shared_bytes = 0;
};

/// The tiling does not depend on the number of rows but for how many a tile has, which changes no
/// sums. Null: not even one row fits in shared memory.
std::optional<ExpertGemvPlan> PlanExpertGemv(const ExpertGemvProblem& problem,
                                             const DeviceShape& device);

/// Warps of the sort's CTA; 0: the histogram of so many experts does not fit in shared memory.
int SortWarpsFor(int64_t selections, int64_t experts, const DeviceShape& device);

}  // namespace marlin::cuda
