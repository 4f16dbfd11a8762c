// Tiling of GEMMs with quantized activations.
#pragma once

#include <optional>

#include "backends/cuda/gemm/fp8/fp8_layout.h"
#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {

/// Columns of quantized activations: k padded to whole tiles.
int QuantizedColumns(int k);

/// One launch of the FP8 kernel.
struct Fp8Launch {
  int tokens = 64;  ///< tile_m: 64, 128 or 256.
  int shared_bytes = 0;
  int groups = 1;  ///< CTAs.
  Fp8Arguments arguments;
};
struct Fp8Plan : Fp8Launch {
  bool partials = false;
  std::optional<Fp8Launch> tail;  ///< The tail wave, as in WgmmaPlan.
};
/// The problem of a GEMM, whose weights are expanded if they are sparse. Precondition: m, n and k
/// fit an int.
TileProblem Fp8ProblemOf(const GemmDesc& desc);
/// Precondition: m, n, k > 0.
Fp8Plan PlanFp8(const TileProblem& problem, const DeviceShape& device);
/// The plan with a given tile_m: for measurements and tests.
Fp8Plan PlanFp8As(const TileProblem& problem, const DeviceShape& device, int tokens);

}  // namespace marlin::cuda
