// Items of the warpgroup kernels in waves of thread blocks, and what is left behind whole waves.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "backends/cuda/kernels/wgmma/wgmma_layout.h"
#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {

/// Items that are left after whole waves of blocks, and the tiles that finish them in one wave.
struct Tail {
  int items = 0;
  int tokens = 0;
  double cycles = 0;
};

/// The cheapest tail of tiles from `costs` for items of `cost`; none where another whole wave costs
/// no more.
std::optional<Tail> TailOf(std::span<const StepCost> costs, const StepCost& cost,
                           const DeviceShape& device, int tiles, int64_t items);

/// The items that are left after whole waves, of whose steps every block takes as many: there is no
/// last wave that is partly filled, but parts of an item must meet.
struct Stream {
  int items = 0;
  double cycles = 0;  ///< Of all items, the whole waves included.
};
/// None where blocks would have few steps each.
std::optional<Stream> StreamOf(const StepCost& cost, const DeviceShape& device, int tiles,
                               int64_t items);

/// Cycles of `items` items: of whole waves, and of the tail where there is one.
double CyclesOf(const StepCost& cost, int multiprocessors, int tiles, int64_t items,
                const std::optional<Tail>& tail);

/// Leaves a tail's items of `tokens` tokens to another launch, whose arguments it returns.
WgmmaArguments CutItems(const Tail& tail, int tokens, WgmmaArguments* whole);

}  // namespace marlin::cuda
