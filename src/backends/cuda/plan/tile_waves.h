// Wave quantization of the WGMMA kernels: output tiles in waves of CTAs, tail waves and stream-K.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "backends/cuda/gemm/wgmma/wgmma_layout.h"
#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {

/// The output tiles left over by full waves, and the narrower tiles that finish them in one wave.
struct Tail {
  int items = 0;   ///< Output tiles of the full width.
  int tokens = 0;  ///< tile_m of the tail.
  double cycles = 0;
};

/// The cheapest tail for output tiles of `cost`, among the tile widths of `costs`; none where a
/// partly filled wave costs no more.
std::optional<Tail> TailOf(std::span<const StepCost> costs, const StepCost& cost,
                           const DeviceShape& device, int tiles, int64_t items);

/// Stream-K over the output tiles left over by full waves: their k-iterations are divided evenly
/// among all CTAs, so no wave is partly filled, but the parts of a tile must be reduced.
struct Stream {
  int items = 0;      ///< Streamed output tiles.
  double cycles = 0;  ///< Estimate for all output tiles, full waves included.
};
/// None where each CTA would get too few k-iterations.
std::optional<Stream> StreamOf(const StepCost& cost, const DeviceShape& device, int tiles,
                               int64_t items);

/// Estimated cycles of `items` output tiles: full waves, and the tail where there is one.
double CyclesOf(const StepCost& cost, int multiprocessors, int tiles, int64_t items,
                const std::optional<Tail>& tail);

/// Removes the tail's output tiles, of `tokens` tokens each, from `whole`, and returns the
/// arguments of the launch that computes them.
WgmmaArguments CutItems(const Tail& tail, int tokens, WgmmaArguments* whole);

}  // namespace marlin::cuda
