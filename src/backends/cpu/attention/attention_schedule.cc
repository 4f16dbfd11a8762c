#include <algorithm>

#include "backends/cpu/attention/cpu_attention.h"
#include "base/attention_window.h"
#include "base/checked.h"

namespace marlin::cpu {
namespace {

/// Rows per run: enough to reuse a widened block or a packed segment of keys, few enough for L2.
constexpr int64_t kRowsPerRun = 64;
constexpr int64_t kRowsPerTileRun = 128;
/// Maximum tokens for split-KV (segments as separate tasks) ...
constexpr int64_t kApartTokens = 4;
/// ... and the maximum if runs and heads alone yield too few tasks.
constexpr int64_t kApartTokensIfFew = 64;
/// Maximum rows that read a block in place; for more rows, widening it once pays off.
constexpr int64_t kRowsInPlace = 8;
/// Tasks per worker, to limit the imbalance at the end.
constexpr int64_t kTasksPerWorker = 4;

/// Whether the segment kernel takes such keys and values: bf16 holds every e4m3 number.
bool HasTiles(DType type) { return type == DType::kBf16 || type == DType::kF8E4M3; }

}  // namespace

AttentionJob AttentionJob::Of(const AttentionInput& input) {
  const auto memory = [](const TensorView& view) {
    return KeyMemory{view.As<uint8_t>(), nullptr,        view.dtype(),
                     view.dim(2),        view.stride(0), view.stride(1)};
  };
  return {input.queries,     memory(input.keys), memory(input.values),
          input.keys.dim(0), input.keys.dim(1),  input.out};
}

AttentionGeometry AttentionGeometry::Of(const AttentionJob& job, const AttentionContext& context) {
  AttentionGeometry g{};
  g.tokens = job.queries.dim(0);
  g.length = job.length;
  g.kv_heads = job.kv_heads;
  g.group = g.kv_heads > 0 ? job.queries.dim(1) / g.kv_heads : 0;
  g.depth = job.queries.dim(2);
  g.width = job.values.features;
  g.padded_depth = RoundUp(g.depth, kFeaturePad);
  g.padded_width = RoundUp(g.width, kFeaturePad);
  g.window = context.window;
  g.chunked = context.chunked;
  g.tiles = context.segment_kernel != nullptr && g.tokens > kApartTokens &&
            HasTiles(job.keys.type) && HasTiles(job.values.type) && g.depth % 32 == 0 &&
            g.width % 16 == 0;
  const int64_t most = g.tiles ? kRowsPerTileRun : kRowsPerRun;
  const int64_t tokens = std::max<int64_t>(most / std::max<int64_t>(g.group, 1), 1);
  g.tokens_per_run = std::clamp<int64_t>(g.tokens, 1, tokens);
  g.runs = g.group > 0 ? CeilDivide(g.tokens, g.tokens_per_run) : 0;
  g.first_segment = g.FirstKey(g.length - g.tokens) / kSegment;
  g.segments = CeilDivide(g.length, kSegment) - g.first_segment;
  const bool few = g.runs * g.kv_heads * context.jobs < 2 * context.workers;
  g.apart = g.segments > 1 && g.tokens <= (few ? kApartTokensIfFew : kApartTokens);
  const bool side_by_side = job.keys.head_stride < job.keys.position_stride;
  if (g.apart) g.CutApart(context, side_by_side);
  return g;
}

void AttentionGeometry::CutApart(const AttentionContext& context, bool side_by_side) {
  const int64_t wanted =
      CeilDivide(kTasksPerWorker * context.workers, std::max<int64_t>(context.jobs * runs, 1));
  // Heads adjacent in memory are processed together, so that memory is read sequentially.
  const int64_t together = side_by_side ? kv_heads : 1;
  const int64_t cuts = CeilDivide(wanted * together, std::max<int64_t>(kv_heads, 1));
  segments_per_part = std::max<int64_t>(segments / cuts, 1);
  segment_parts = CeilDivide(segments, segments_per_part);
  const int64_t head_cuts = CeilDivide(wanted, segment_parts);
  heads_per_part = std::clamp<int64_t>(kv_heads / head_cuts, 1, std::max<int64_t>(together, 1));
  head_parts = CeilDivide(kv_heads, heads_per_part);
}

int64_t AttentionGeometry::FirstKey(int64_t position) const {
  return FirstVisibleKey(position, window, chunked);
}

bool AttentionGeometry::ReadsInPlace(const KeyMemory& memory) const {
  return rows() <= kRowsInPlace && memory.features % kFeaturePad == 0 &&
         memory.type != DType::kF8E4M3;
}

int64_t AttentionGeometry::StateFloats() const {
  return 2 * RoundUp(rows(), kFeaturePad) + rows() * padded_width;
}

int64_t AttentionGeometry::PackedFloats(const SegmentKernel* kernel) const {
  if (!tiles) return 0;
  return (apart ? heads_per_part : 1) * RoundUp(kernel->packed_floats(rows(), depth), kFeaturePad);
}

int64_t AttentionGeometry::ScratchFloats(const SegmentKernel* kernel) const {
  const int64_t states = 2 * StateFloats();
  const int64_t block = kKeyBlock * (padded_depth + padded_width);
  const int64_t scores = rows() * kKeyBlock + 3 * RoundUp(rows(), kFeaturePad);
  const int64_t segment = tiles ? RoundUp(kernel->scratch_floats(depth, width), kFeaturePad) +
                                      PackedFloats(kernel) + RoundUp(WidenedFloats(), kFeaturePad)
                                : 0;
  return QueryFloats() + block + scores + states + segment;
}

void AttentionTotals::Add(const AttentionJob& job, const AttentionContext& context) {
  const auto g = AttentionGeometry::Of(job, context);
  scratch_floats = std::max(scratch_floats, g.ScratchFloats(context.segment_kernel));
  if (g.apart) partial_floats += g.runs * g.RunFloats();
  tasks += g.tasks();
  merges += g.merges();
}

AttentionSchedule::AttentionSchedule(std::span<const AttentionJob> jobs,
                                     const AttentionContext& context)
    : jobs_(jobs), context_(context) {
  for (const AttentionJob& job : jobs) totals_.Add(job, context);
}

AttentionSchedule::Place AttentionSchedule::Find(int64_t index, bool merging) const {
  Place place{};
  for (const AttentionJob& job : jobs_) {
    place.job = &job;
    place.g = AttentionGeometry::Of(job, context_);
    const int64_t count = merging ? place.g.merges() : place.g.tasks();
    place.index = index;
    if (index < count) break;
    index -= count;
    if (place.g.apart) place.partials += place.g.runs * place.g.RunFloats();
  }
  return place;
}

}  // namespace marlin::cpu
