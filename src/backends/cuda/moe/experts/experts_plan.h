// Plans the GEMV, WGMMA and MMA launches of a layer's experts: a pure function of the problem and
// the device.
#pragma once

#include <cstdint>
#include <optional>

#include "backends/cuda/moe/experts/experts_layout.h"
#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {

/// The matrices of one launch.
struct ExpertTilesProblem {
  TileView weights;
  CodeKind kind = CodeKind::kFp4;
  int64_t experts = 0;  ///< Without the shared one.
  int sides = 1;
  int64_t matrix_weights = 0;   ///< In one matrix of an expert, hidden x inner.
  int64_t rows_per_expert = 1;  ///< On average.
  int64_t own_sort_bytes = 0;   ///< OwnSortBytes, if CTAs may have to sort.
  ParameterUse use = ParameterUse::kOneScale;
};

struct ExpertGemvPlan {
  ExpertGemvArguments arguments;  ///< Without table, slots, rows and out.
  int octets = 1;
  int shared_bytes = 0;
};

struct ExpertWgmmaPlan {
  ExpertWgmmaArguments arguments;  ///< Without table, slots, activation and out.
  int shared_bytes = 0;
};

struct ExpertMmaPlan {
  ExpertMmaArguments arguments;  ///< Without table, slots, activation, rows and out.
  int resident = 1;              ///< CTAs of a multiprocessor.
  int shared_bytes = 0;
};

/// The tiling depends on the number of rows only in how many a tile has, which changes no sums.
/// Null: not even one row fits in shared memory.
std::optional<ExpertGemvPlan> PlanExpertGemv(const ExpertTilesProblem& problem,
                                             const DeviceShape& device);

/// Null: no WGMMA, too few rows for the kernel to pay, no k, or its schedule does not fit in shared
/// memory. `gated`: sides are a gate and an up.
std::optional<ExpertWgmmaPlan> PlanExpertWgmma(const ExpertTilesProblem& problem, bool gated,
                                               const DeviceShape& device);

/// The same for devices without WGMMA; null on others.
std::optional<ExpertMmaPlan> PlanExpertMma(const ExpertTilesProblem& problem, bool gated,
                                           const DeviceShape& device);

/// CTAs of the sort.
int SortPartsFor(int64_t selections);
/// Warps of such a CTA; 0: the histogram of the experts does not fit in shared memory.
int SortWarpsFor(int64_t selections, int64_t experts, const DeviceShape& device);

}  // namespace marlin::cuda
