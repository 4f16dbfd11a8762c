#include "backends/cuda/attention/attention_plan.h"

#include <algorithm>

#include "backends/cuda/attention/attention_layout.h"
#include "base/checked.h"

namespace marlin::cuda {

AttentionPlan PlanAttention(const AttentionShape& shape, int multiprocessors) {
  // A grid has no more in its third dimension.
  constexpr int64_t kMostSegments = 65535;
  constexpr int64_t kMostPartialBytes = int64_t{256} << 20;
  AttentionPlan plan;
  const int64_t rows = shape.rows * shape.group;
  plan.tile_rows = rows <= 4 * shape.sequences ? 4 : 16;
  plan.tiles = rows / plan.tile_rows + shape.sequences;
  const int64_t segments = CeilDivide(shape.length, int64_t{kSegmentKeys});
  const int64_t bytes = plan.tiles * shape.kv_heads * segments *
                        PartialFloats(plan.tile_rows, static_cast<int>(shape.value_dim)) *
                        int64_t{sizeof(float)};
  const bool idle = plan.tiles * shape.kv_heads < 2 * int64_t{multiprocessors};
  if (idle && segments > 1 && segments <= kMostSegments && bytes <= kMostPartialBytes) {
    plan.segments = segments;
    plan.partial_bytes = bytes;
  }
  return plan;
}

namespace {

/// Tiles of several tokens read every key once for all of them, but only pay where they occupy the
/// device.
bool IsPrefill(const AttentionShape& shape, int multiprocessors) {
  if (std::max(shape.key_dim, shape.value_dim) > kMostTileFeatures) return false;
  const int64_t warpgroups = shape.rows * shape.group / kWarpgroupRows + shape.sequences;
  const bool several = shape.rows * shape.group >= 2 * kDecodeHeads * shape.sequences;
  return several && shape.rows > shape.sequences &&
         warpgroups * shape.kv_heads >= int64_t{multiprocessors} / 2;
}

}  // namespace

AttentionPlan PlanMatrixAttention(const AttentionShape& shape, int multiprocessors) {
  // A CTA merges them, one after another.
  constexpr int64_t kMostSegments = 32;
  constexpr int64_t kCtasPerMultiprocessor = 2;
  AttentionPlan plan;
  if (IsPrefill(shape, multiprocessors)) {
    plan.tile_rows = PrefillRows(static_cast<int>(shape.value_dim));
    plan.tiles = shape.rows * shape.group / plan.tile_rows + shape.sequences;
    return plan;
  }
  plan.tile_rows = kDecodeHeads;
  plan.tiles = shape.rows * CeilDivide(shape.group, int64_t{kDecodeHeads});
  const int64_t blocks = CeilDivide(shape.length, int64_t{kCachePageTokens});
  const int64_t wanted =
      kCtasPerMultiprocessor * multiprocessors / std::max<int64_t>(plan.tiles * shape.kv_heads, 1);
  plan.segments = std::clamp(wanted, int64_t{1}, std::clamp(blocks, int64_t{1}, kMostSegments));
  if (plan.segments > 1) {
    plan.partial_bytes = plan.tiles * shape.kv_heads * plan.segments *
                         PartialFloats(kDecodeHeads, static_cast<int>(shape.value_dim)) *
                         int64_t{sizeof(float)};
  }
  return plan;
}

}  // namespace marlin::cuda
