#include "backends/cuda/attention/attention_plan.h"

#include <algorithm>

#include "backends/cuda/attention/attention_layout.h"
#include "backends/cuda/attention/decode/decode_layout.h"
#include "backends/cuda/attention/exact/exact_attention_layout.h"
#include "backends/cuda/attention/prefill/mma_layout.h"
#include "base/checked.h"

namespace marlin::cuda {

AttentionPlan PlanAttention(const AttentionShape& shape, const DeviceShape& device) {
  // A grid has no more in its third dimension.
  constexpr int64_t kMostSegments = 65535;
  constexpr int64_t kMostPartialBytes = int64_t{256} << 20;
  AttentionPlan plan;
  const int64_t rows = shape.rows * shape.group;
  plan.tile_rows = ExactTileFor(rows <= 4 * shape.sequences ? 4 : 16,
                                static_cast<int>(shape.key_dim), device.shared_bytes)
                       .rows;
  plan.tiles = rows / plan.tile_rows + shape.sequences;
  const int64_t segments = CeilDivide(shape.length, int64_t{kSegmentKeys});
  const int64_t bytes = plan.tiles * shape.kv_heads * segments *
                        PartialFloats(plan.tile_rows, static_cast<int>(shape.value_dim)) *
                        int64_t{sizeof(float)};
  const bool idle = plan.tiles * shape.kv_heads < 2 * int64_t{device.multiprocessors};
  if (idle && segments > 1 && segments <= kMostSegments && bytes <= kMostPartialBytes) {
    plan.segments = segments;
    plan.partial_bytes = bytes;
  }
  return plan;
}

namespace {

/// Tiles of several tokens read every key once for all of them, but only pay where they occupy the
/// device.
bool IsPrefill(const AttentionShape& shape, const DeviceShape& device) {
  if (std::max(shape.key_dim, shape.value_dim) > kMostTileFeatures) return false;
  const int64_t warpgroups = shape.rows * shape.group / kWarpgroupRows + shape.sequences;
  const bool several = shape.rows * shape.group >= 2 * kDecodeHeads * shape.sequences;
  return several && shape.rows > shape.sequences &&
         warpgroups * shape.kv_heads >= int64_t{device.multiprocessors} / 2;
}

int RowsOfTiles(const AttentionShape& shape, const DeviceShape& device) {
  const auto value_dim = static_cast<int>(shape.value_dim);
  if (device.has_wgmma) return PrefillRows(value_dim, shape.one_term);
  const bool one_term = shape.one_term || shape.bf16_queries;
  const MmaHeads heads = {static_cast<int>(shape.key_dim), value_dim, one_term ? 1 : 2, shape.fp8};
  return MmaShapeFor(heads, device.shared_bytes).Rows();
}

/// CTAs of decode that a multiprocessor takes: Hopper's two, and elsewhere those that fit in its
/// shared memory, of which a CTA cannot have the last KiB.
int64_t DecodeCtas(const AttentionShape& shape, const DeviceShape& device) {
  constexpr int64_t kMost = 2;
  constexpr int64_t kReserved = 1024;  // The driver takes it of every CTA.
  if (device.has_wgmma) return kMost;
  const auto key_dim = static_cast<int>(shape.key_dim);
  const auto value_dim = static_cast<int>(shape.value_dim);
  const DecodeShape of = DecodeShapeFor(key_dim, value_dim, shape.fp8, device.shared_bytes);
  const int64_t bytes = of.Bytes(key_dim, value_dim, shape.fp8) + kReserved;
  return std::clamp((device.shared_bytes + kReserved) / bytes, int64_t{1}, kMost);
}

}  // namespace

AttentionPlan PlanMatrixAttention(const AttentionShape& shape, const DeviceShape& device) {
  // A CTA merges them, one after another.
  constexpr int64_t kMostSegments = 32;
  AttentionPlan plan;
  if (IsPrefill(shape, device)) {
    plan.tile_rows = RowsOfTiles(shape, device);
    plan.tiles = shape.rows * shape.group / plan.tile_rows + shape.sequences;
    return plan;
  }
  plan.tile_rows = kDecodeHeads;
  plan.tiles = shape.rows * CeilDivide(shape.group, int64_t{kDecodeHeads});
  const int64_t blocks = CeilDivide(shape.length, int64_t{kCachePageTokens});
  const int64_t wanted = DecodeCtas(shape, device) * device.multiprocessors /
                         std::max<int64_t>(plan.tiles * shape.kv_heads, 1);
  plan.segments = std::clamp(wanted, int64_t{1}, std::clamp(blocks, int64_t{1}, kMostSegments));
  if (plan.segments > 1) {
    plan.partial_bytes = plan.tiles * shape.kv_heads * plan.segments *
                         PartialFloats(kDecodeHeads, static_cast<int>(shape.value_dim)) *
                         int64_t{sizeof(float)};
  }
  return plan;
}

}  // namespace marlin::cuda
