#include <algorithm>

#include "backends/cuda/attention/attention_layout.h"
#include "backends/cuda/attention/attention_plan.h"
#include "base/checked.h"

namespace marlin::cuda {

bool TakesWideTiles(const AttentionShape& shape) {
  const bool wide = std::max(shape.key_dim, shape.value_dim) > kMostTileFeatures;
  const bool several = shape.rows * shape.group >= 2 * kDecodeHeads * shape.sequences;
  return wide && several && shape.rows > shape.sequences && shape.value_dim <= shape.key_dim;
}

AttentionPlan PlanLatentAttention(const AttentionShape& shape, const DeviceShape& device) {
  // A warp merges them, two a lane.
  constexpr int64_t kMostSegments = 64;
  // A part costs its sums, about as much as half a block of keys.
  constexpr int64_t kLeastBlocks = 2;
  AttentionPlan plan;
  const int64_t rows = shape.rows * shape.group;
  plan.tile_rows = rows >= 32 * shape.sequences ? 32 : 16;
  plan.tiles = rows / plan.tile_rows + shape.sequences;
  // Tiles are counted from above; as many have rows.
  const int64_t full = std::max(CeilDivide(rows, int64_t{plan.tile_rows}), int64_t{1});
  const int64_t blocks = CeilDivide(shape.length, int64_t{kCachePageTokens});
  const int64_t most = std::clamp(CeilDivide(blocks, kLeastBlocks), int64_t{1}, kMostSegments);
  plan.segments = std::clamp(device.multiprocessors / (full * shape.kv_heads), int64_t{1}, most);
  if (plan.segments > 1) {
    plan.partial_bytes = plan.tiles * shape.kv_heads * plan.segments *
                         PartialFloats(plan.tile_rows, static_cast<int>(shape.value_dim)) *
                         int64_t{sizeof(float)};
  }
  return plan;
}

}  // namespace marlin::cuda
