// The launches of a layer's experts: pure functions of the pass and its memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backends/metal/moe/expert_table.h"
#include "backends/metal/moe/expert_tiling.h"
#include "backends/metal/runtime/driver.h"
#include "backends/metal/runtime/error_words.h"
#include "plan/moe/experts.h"

namespace marlin::metal {

/// The arrays of a pass in its workspace, as kernels/expert_parameters.h names them; without
/// sorting inner and scores, and results if there are several kinds of down matrices.
struct ExpertArrays {
  MemoryRange begin;
  MemoryRange tiles;
  MemoryRange tokens;
  MemoryRange slot_of;
  MemoryRange ranks;
  MemoryRange counts;
  MemoryRange inner;    ///< f32 [slots, inner_stride]: the products of gate and up.
  MemoryRange results;  ///< f32 [slots, hidden]: the outputs of down.
  MemoryRange scores;   ///< f32 [slots]; empty: the shared expert has no gate.
  int64_t bytes = 0;    ///< Size of all arrays.
};

/// A planned pass: everything but the operands.
struct PlannedPass {
  ExpertPass pass;
  ExpertTiling tiling;
  bool unsorted = false;  ///< IsBestUnsorted: slots are selections, and there are no tiles.
};

/// Lays the arrays of a pass out from `workspace` on, which may be null.
ExpertArrays LayOutArrays(const PlannedPass& planned, const LayerExperts& layer,
                          const ExpertTable& table, std::byte* workspace);

/// The launches of a pass over tokens with the operands of `call`, in order: sort, gate and
/// up, activation where it is not part of them, down, sum. `error` is written by the first.
std::vector<KernelLaunch> ExpertLaunches(const PlannedPass& planned, const ExpertsProblem& problem,
                                         const LayerExperts& layer, const ExpertTable& table,
                                         const ExpertsCall& call, ErrorWords::Word* error);

}  // namespace marlin::metal
