#include "backends/cuda/kernels/decoder/attention_plan.h"

#include "backends/cuda/kernels/decoder/decoder_layout.h"
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

}  // namespace marlin::cuda
