// Plans the launch of attention: a pure function of the shapes that the host knows.
#pragma once

#include <cstdint>

#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {

/// The shapes of a call; `length`: keys of the longest sequence, at most.
struct AttentionShape {
  int64_t rows = 0;  ///< Tokens of all sequences.
  int64_t sequences = 1;
  int64_t kv_heads = 1;
  int64_t group = 1;
  int64_t value_dim = 0;
  int64_t length = 0;
  int64_t key_dim = 0;
  bool fp8 = false;  ///< The cache has codes of e4m3.
  bool bf16_queries = false;
  bool one_term = false;  ///< AttentionOptions::allow_bf16_activations.
};

struct AttentionPlan {
  int tile_rows = 16;
  int64_t tiles = 0;
  int64_t segments = 0;  ///< 0: not split.
  int64_t partial_bytes = 0;
};

/// Splits the keys where tiles alone would leave the device idle. The plan does not change results.
AttentionPlan PlanAttention(const AttentionShape& shape, const DeviceShape& device);

/// Attention on matrix units. The sums depend on the plan. segments = 0: prefill, tiles of
/// PrefillRows query rows (on mma.sync of MmaShapeFor), if heads are not too wide for it. Else
/// decode, one token per CTA, whose keys are split into equal parts, as many as occupy the device.
AttentionPlan PlanMatrixAttention(const AttentionShape& shape, const DeviceShape& device);

/// Whether tiles of latent attention take heads with values of their own: those that are too wide
/// for PrefillRows, where a sequence has several tokens, so that they read keys less often than
/// decode.
bool TakesWideTiles(const AttentionShape& shape);

/// Latent attention: tiles of 16 or 32 query rows of a sequence, and at least one part of their
/// keys: as many as occupy the device. The sums depend on the plan.
AttentionPlan PlanLatentAttention(const AttentionShape& shape, const DeviceShape& device);

}  // namespace marlin::cuda
