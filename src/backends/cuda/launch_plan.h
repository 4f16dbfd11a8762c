// How products are cut into thread blocks: pure functions of the problem and the device.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>

#include "backends/cuda/gemv_layout.h"
#include "backends/cuda/tile_layout.h"
#include "backends/cuda/wgmma_layout.h"
#include "base/checked.h"

namespace marlin::cuda {

/// Facts of a device that plans depend on.
struct DeviceShape {
  int multiprocessors = 132;
  /// How many clusters of 1, 2, ... blocks, one block to a multiprocessor, run at once.
  int clusters[kMaxSplits] = {132, 66, 42, 30, 24, 20, 16, 14};
  int shared_bytes = 227 * 1024;  ///< That a thread block may have.
};

/// A problem on tiles.
struct TileProblem {
  int m = 0;
  int n = 0;
  int k = 0;
  int tile_bytes = 0;
  bool gated = false;
  bool batch_invariant = false;
  bool pair_table = false;    ///< Codes are looked up in a table in shared memory (kTable4).
  bool narrow_codes = false;  ///< Up to 4 bits, one scale to a tile: units may have two strips.

  auto operator<=>(const TileProblem&) const = default;
};

inline constexpr int kMaxGemvRows = 16;

/// Tiles in flight of a warp of the kernel for few rows, whose rings have no more slots: three and
/// four gained nothing on an H200.
inline constexpr int kMaxStages = 2;

struct GemvPlan {
  int splits = 1;
  int groups = 1;  ///< Blocks along n.
  int warps = 16;
  int strips = 1;  ///< Of a unit: what a warp works on at a time.
  int shared_bytes = 0;
  bool partials = false;    ///< Sums go to the workspace.
  bool in_memory = false;   ///< The blocks add them, given memory to meet in; else a kernel.
  GemvArguments arguments;  ///< The parts that depend on the problem's shape alone.
};
/// Of all blocks along n.
inline int UnitsOf(const GemvPlan& plan) {
  return plan.arguments.units_base * plan.groups + plan.arguments.units_rest;
}

/// Words of the tickets of a plan whose blocks meet in memory, and bytes of them and the sums.
inline int64_t TicketWords(const GemvPlan& plan) { return RoundUp(UnitsOf(plan), int64_t{32}); }
int64_t MeetingBytes(const GemvPlan& plan);

/// How the blocks of the kernel for few rows are made.
struct GemvShape {
  int warps = 16;
  int stages = 1;        ///< Tiles in flight of every warp: up to kMaxStages.
  int first_stages = 1;  ///< Of them those that are asked for before the activations.
  int splits = 1;        ///< Blocks that divide k.
  int strips = 1;        ///< Of a unit: 1 or 2.
  /// Blocks that share copies of activations: 1, or 2 if k is a multiple of 8 and, in clusters,
  /// splits x 2 are at most kMaxSplits.
  int mates = 1;
  bool in_memory = false;  ///< Splits meet in memory, not in a cluster.
};
/// Nothing where shared memory does not suffice. Preconditions as for PlanGemv.
std::optional<GemvPlan> PlanGemvAs(const TileProblem& problem, const DeviceShape& device,
                                   const GemvShape& shape);
/// Precondition: 1 <= m <= kMaxGemvRows, n, k > 0.
GemvPlan PlanGemv(const TileProblem& problem, const DeviceShape& device);

/// One launch of the warpgroup kernel.
struct WgmmaLaunch {
  int tokens = 64;  ///< Of a tile: one of kWgmmaWidths.
  int shared_bytes = 0;
  int groups = 1;  ///< Of `splits` blocks each.
  WgmmaArguments arguments;
};
struct WgmmaPlan : WgmmaLaunch {
  bool partials = false;  ///< Sums of every output go to the workspace.
  /// Another launch for the last items, in narrower tiles, where whole ones would leave most of
  /// the device idle.
  std::optional<WgmmaLaunch> tail;
};
/// Sums of every output that go to the workspace, where the plan has partials.
inline int PartsOf(const WgmmaPlan& plan) {
  return plan.arguments.in_cluster ? 1 : plan.arguments.splits;
}
/// Bytes of the tickets of a plan with streamed items, which lie before its parts.
int64_t StreamTicketBytes(const WgmmaPlan& plan);
/// Bytes of the workspace that a plan takes.
int64_t SumBytes(const TileProblem& problem, const WgmmaPlan& plan);
/// How many tokens an item has and how many blocks divide its k.
struct WgmmaShape {
  int tokens;
  int splits;
};
/// Precondition: m, n, k > 0.
WgmmaPlan PlanWgmma(const TileProblem& problem, const DeviceShape& device);
/// The plan of a shape that was chosen elsewhere, which CanPlanWgmmaAs allows.
WgmmaPlan PlanWgmmaAs(const TileProblem& problem, const DeviceShape& device,
                      const WgmmaShape& shape);
/// The same without a tail.
WgmmaPlan PlanWholeTiles(const TileProblem& problem, const DeviceShape& device,
                         const WgmmaShape& shape);
/// What PlanWgmma takes.
WgmmaShape ChooseWgmmaShape(const TileProblem& problem, const DeviceShape& device);
bool CanPlanWgmmaAs(const TileProblem& problem, const DeviceShape& device, const WgmmaShape& shape);

/// Whether PlanWgmma's cut is expected to take less time than PlanGemv's, where that is known: from
/// nine rows on, for codes that are as cheap to decode in both. Precondition: as for PlanGemv.
bool WgmmaTakesLess(const TileProblem& problem, const DeviceShape& device);

/// Bytes of partial sums in the workspace.
int64_t PartialBytes(const TileProblem& problem, int splits);

}  // namespace marlin::cuda
