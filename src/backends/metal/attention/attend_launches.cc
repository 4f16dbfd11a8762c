#include "backends/metal/attention/attend_launches.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "backends/metal/attention/launch_buffers.h"
#include "backends/metal/attention/row_report.h"
#include "backends/metal/gemm/row_parts.h"
#include "backends/metal/gemm/strip_layout.h"
#include "backends/metal/kernels/attention/attend_parameters.h"
#include "base/checked.h"
#include "base/errors.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

/// With few features first, then few heads.
constexpr AttendKernel kKernels[] = {
    {"attend_1_64", 1, 64},   {"attend_4_64", 4, 64},     {"attend_8_64", 8, 64},
    {"attend_1_128", 1, 128}, {"attend_4_128", 4, 128},   {"attend_8_128", 8, 128},
    {"attend_1_256", 1, 256}, {"attend_4_256", 4, 256},   {"attend_1_512", 1, 512},
    {"attend_2_512", 2, 512}, {"attend_1_1024", 1, 1024},
};
static_assert(std::end(kKernels)[-1].features == kernels::kMostAttendFeatures);
constexpr AttendKernel kTileKernels[] = {{"attend_tile_64", 0, 64},
                                         {"attend_tile_128", 0, 128},
                                         {"attend_tile_256", 0, 256},
                                         {"attend_tile_576", 0, 576}};
static_assert(std::end(kTileKernels)[-1].features == kernels::kMostTileFeatures);

static_assert(sizeof(kernels::AttendParameters) <= 4096, "setBytes takes no more");

/// Positions, with room for a segment beyond the last one.
constexpr int64_t kMostLength = std::numeric_limits<int32_t>::max() - 2 * kernels::kSegmentKeys;
/// Query heads of a KV head with which tiles read keys less often than single rows do.
constexpr int64_t kLeastWideGroup = 4;
/// As the places of kernels/check_rows.h.
constexpr int64_t kMostRows = int64_t{1} << 28;
/// With fewer threadgroups per core than these the segments of a row have threadgroups of their
/// own.
constexpr int64_t kThreadgroupsOfCore = 4;
constexpr int64_t kMostSumsBytes = int64_t{128} << 20;
/// The dot products of single rows reach a quarter of the operations that the products of GEMMs do,
/// and tiles the half of them.
constexpr int64_t kMostSingleOperations = kMostOperationsOfPart / 4;
constexpr int64_t kMostTileOperations = kMostOperationsOfPart / 2;

int64_t KeyDim(const AttendOperands& operands) { return operands.queries.dim(2); }
int64_t ValueDim(const AttendOperands& operands) { return operands.out.dim(2); }
int64_t Features(const AttendOperands& operands) {
  return std::max(KeyDim(operands), ValueDim(operands));
}

AttendKernel KernelFor(int64_t group, int64_t features) {
  AttendKernel chosen;
  for (const AttendKernel& kernel : kKernels) {
    if (kernel.features < features) continue;
    if (!chosen.function.empty() && kernel.features > chosen.features) break;
    chosen = kernel;
    if (kernel.heads >= group) break;
  }
  return chosen;
}

/// Keys that a row sees at most.
int64_t MostVisible(const AttendOperands& operands) {
  const int64_t length = operands.most_length();
  return operands.options.window > 0 ? std::min(operands.options.window, length) : length;
}

/// Segments that adjacent tokens have at most: their keys may begin and end in any place of one.
int64_t MostSegments(const AttendOperands& operands, int64_t tokens) {
  constexpr int64_t kKeys = kernels::kSegmentKeys;
  const int64_t of_length = CeilDivide(operands.most_length(), kKeys);
  const int64_t of_tokens = CeilDivide(MostVisible(operands) + tokens - 1 + kKeys - 1, kKeys);
  return std::max<int64_t>(std::min(of_length, of_tokens), 1);
}

/// Gives the segments threadgroups of their own if there are too few otherwise. `rows`: those with
/// sums in memory.
void SplitSegments(const AttendOperands& operands, const DeviceShape& shape, int64_t threadgroups,
                   int64_t segments, int64_t rows, AttendPlan* plan) {
  const int64_t bytes = rows * operands.queries.dim(1) * segments *
                        kernels::PartialFloats(static_cast<int32_t>(ValueDim(operands))) *
                        int64_t{sizeof(float)};
  if (segments == 1 || threadgroups >= kThreadgroupsOfCore * shape.cores ||
      plan->indices_of_launch != plan->indices || bytes > kMostSumsBytes) {
    return;
  }
  plan->segments = segments;
  plan->sums_bytes = bytes;
  plan->merged_rows = rows;
}

/// Operations of `rows` query heads over all keys that they may see.
int64_t AttendOperationsOf(const AttendOperands& operands, int64_t rows) {
  return 2 * rows * (KeyDim(operands) + ValueDim(operands)) *
         std::max<int64_t>(MostVisible(operands), 1);
}

int64_t IndicesOfLaunch(int64_t indices, int64_t most) {
  return std::clamp<int64_t>(most, 1, std::max<int64_t>(indices, 1));
}

bool KeysAligned(const AttendOperands& operands) {
  const int64_t key_dim = KeyDim(operands);
  const int64_t value_dim = ValueDim(operands);
  if (key_dim % 4 != 0 || value_dim % 4 != 0) return false;
  if (!operands.paged()) return QuadsAligned(operands.keys) && QuadsAligned(operands.values);
  const PagedCache& cache = *operands.cache;
  return std::ranges::all_of(cache.slabs, [&](const void* slab) {
    return QuadsAligned(slab, cache.type, {cache.page_stride, cache.first_element});
  });
}

void SetConstants(const AttendOperands& operands, KernelLaunch* launch) {
  const bool paged = operands.paged();
  const TensorView& queries = operands.queries;
  FunctionConstants& constants = launch->constants;
  constants[MARLIN_CONSTANT_INPUT_TYPE] = ElementTypeOf(queries.dtype());
  constants[MARLIN_CONSTANT_ALIGNED_INPUT] = QuadsAligned(queries) ? 1 : 0;
  constants[MARLIN_CONSTANT_OUTPUT_TYPE] = ElementTypeOf(operands.out.dtype());
  constants[MARLIN_CONSTANT_KEY_TYPE] =
      ElementTypeOf(paged ? operands.cache->type : operands.keys.dtype());
  constants[MARLIN_CONSTANT_VALUE_TYPE] =
      ElementTypeOf(paged ? operands.cache->type : operands.values.dtype());
  constants[MARLIN_CONSTANT_PAGED_KEYS] = paged ? 1 : 0;
  constants[MARLIN_CONSTANT_ALIGNED_KEYS] = KeysAligned(operands) ? 1 : 0;
}

}  // namespace

Status SetPages(const SequenceRows& rows, const PagedCache& cache, const Driver& driver,
                kernels::AttendParameters* p) {
  kernels::PagedRows& pages = p->pages;
  MARLIN_RETURN_IF_ERROR(SetSlabs(cache, driver, &pages));
  pages.rows = static_cast<int32_t>(rows.positions.dim(0));
  pages.sequences = static_cast<int32_t>(rows.first_rows.dim(0)) - 1;
  pages.blocks = static_cast<int32_t>(rows.block_tables.dim(1));
  p->key_stride = cache.key_dim;
  p->key_head_stride = cache.page_tokens * cache.key_dim;
  p->value_stride = cache.values_in_keys ? cache.key_dim : cache.value_dim;
  p->value_head_stride = cache.page_tokens * p->value_stride;
  p->first_value = cache.values_in_keys ? 0 : cache.kv_heads * p->key_head_stride;
  return Status();
}

namespace {

void SetTensors(const AttendOperands& operands, kernels::AttendParameters* p) {
  p->length = static_cast<int32_t>(operands.keys.dim(0));
  p->key_stride = operands.keys.stride(0);
  p->key_head_stride = operands.keys.stride(1);
  p->value_stride = operands.values.stride(0);
  p->value_head_stride = operands.values.stride(1);
}

Result<kernels::AttendParameters> ParametersOf(const AttendOperands& operands,
                                               const Driver& driver) {
  kernels::AttendParameters p{};
  const AttentionOptions& options = operands.options;
  p.query_stride = operands.queries.stride(0);
  p.query_head_stride = operands.queries.stride(1);
  p.out_stride = operands.out.stride(0);
  p.out_head_stride = operands.out.stride(1);
  p.kv_heads = static_cast<int32_t>(operands.kv_heads());
  p.group = static_cast<int32_t>(operands.group());
  p.key_dim = static_cast<int32_t>(KeyDim(operands));
  p.value_dim = static_cast<int32_t>(ValueDim(operands));
  // A longer window than there are positions is none.
  p.window = options.window > kMostLength ? 0 : static_cast<int32_t>(options.window);
  p.chunked = options.chunked ? 1 : 0;
  p.has_sinks = options.sinks.empty() ? 0 : 1;
  p.softcap = options.softcap;
  p.query_scale =
      options.scale != 0.0F ? options.scale : 1.0F / std::sqrt(static_cast<float>(p.key_dim));
  p.pages.rows = static_cast<int32_t>(operands.queries.dim(0));
  if (operands.paged()) {
    MARLIN_RETURN_IF_ERROR(SetPages(*operands.rows, *operands.cache, driver, &p));
  } else {
    SetTensors(operands, &p);
  }
  return p;
}

/// The read buffers of the kernels, without queries and slabs.
std::vector<KernelBuffer> ReadBuffers(const AttendOperands& operands) {
  std::vector<KernelBuffer> buffers;
  // Absent buffers have no memory.
  const auto bind = [&](int index, const TensorView* view) {
    buffers.push_back(view == nullptr || view->empty() ? KernelBuffer{index}
                                                       : BufferOf(index, *view));
  };
  const bool paged = operands.paged();
  bind(MARLIN_BUFFER_KEYS, &operands.keys);
  bind(MARLIN_BUFFER_VALUES, &operands.values);
  bind(MARLIN_BUFFER_SINKS, &operands.options.sinks);
  bind(MARLIN_BUFFER_POSITIONS, paged ? &operands.rows->positions : nullptr);
  bind(MARLIN_BUFFER_FIRST_ROWS, paged ? &operands.rows->first_rows : nullptr);
  bind(MARLIN_BUFFER_BLOCK_TABLES, paged ? &operands.rows->block_tables : nullptr);
  return buffers;
}

/// Binds queries and results: as one buffer where their memory overlaps, as in place.
void BindRows(const AttendOperands& operands, KernelLaunch* launch) {
  auto& p = launch->other_parameters.As<kernels::AttendParameters>();
  const KernelBuffer queries = BufferOf(MARLIN_BUFFER_QUERIES, operands.queries);
  KernelBuffer out = Written(BufferOf(MARLIN_BUFFER_ATTENDED, operands.out));
  p.query_offset = -1;
  p.out_offset = 0;
  if (!Overlap(queries, out)) {
    launch->buffers.push_back(queries);
    launch->buffers.push_back(out);
    return;
  }
  const auto* const first_query = static_cast<const std::byte*>(queries.data);
  const auto* const first_out = static_cast<const std::byte*>(out.data);
  const auto* const begin = std::min(first_query, first_out);
  p.query_offset = first_query - begin;
  p.out_offset = first_out - begin;
  out.data = begin;
  out.bytes = std::max(p.query_offset + queries.bytes, p.out_offset + out.bytes);
  out.cleared = true;
  launch->buffers.push_back({MARLIN_BUFFER_QUERIES});
  launch->buffers.push_back(out);
}

/// Binds what all kernels read and write.
void BindOperands(const AttendOperands& operands, void* sums, int64_t sums_bytes,
                  KernelLaunch* launch) {
  BindRows(operands, launch);
  for (const KernelBuffer& buffer : ReadBuffers(operands)) launch->buffers.push_back(buffer);
  launch->buffers.push_back(sums_bytes == 0 ? KernelBuffer{MARLIN_BUFFER_SUMS}
                                            : Written({MARLIN_BUFFER_SUMS, sums, sums_bytes}));
  if (operands.paged()) AddressSlabs(*operands.cache, launch);
}

KernelLaunch MergeLaunch(const AttendOperands& operands, const AttendPlan& plan,
                         const KernelLaunch& attend, void* sums) {
  KernelLaunch launch;
  launch.source = "attend.metal";
  launch.function = "attend_merge";
  launch.constants = attend.constants;
  launch.other_parameters = attend.other_parameters;
  launch.threads = kernels::kMergeThreads;
  launch.threadgroups = {static_cast<uint32_t>(operands.queries.dim(1)), 1,
                         static_cast<uint32_t>(plan.merged_rows)};
  for (const KernelBuffer& buffer : attend.buffers) {
    switch (buffer.index) {
      case MARLIN_BUFFER_ATTENDED:
      case MARLIN_BUFFER_SINKS:
      case MARLIN_BUFFER_POSITIONS:
      case MARLIN_BUFFER_FIRST_ROWS:
        launch.buffers.push_back(buffer);
        break;
      default:
        break;
    }
  }
  launch.buffers.push_back({MARLIN_BUFFER_SUMS, sums, plan.sums_bytes});
  return launch;
}

/// Rows of attend_H_D, or places for rows.
AttendPlan PlanSingle(const AttendOperands& operands, const DeviceShape& shape, int64_t indices) {
  AttendPlan plan;
  const int64_t group = operands.group();
  const int64_t heads = operands.queries.dim(1);
  plan.kernel = KernelFor(group, Features(operands));
  plan.head_parts = CeilDivide(group, plan.kernel.heads);
  plan.indices = indices;
  plan.indices_of_launch =
      IndicesOfLaunch(indices, kMostSingleOperations / AttendOperationsOf(operands, heads));
  const int64_t threadgroups = indices * operands.kv_heads() * plan.head_parts;
  SplitSegments(operands, shape, threadgroups, MostSegments(operands, 1), indices, &plan);
  return plan;
}

/// Tokens of a sequence from which on attend_tile_D takes its rows; 0: it takes none.
int64_t LeastTileTokens(const AttendOperands& operands, const DeviceShape& shape) {
  const int64_t features = Features(operands);
  if (!shape.known_fragments || features > kernels::kMostTileFeatures ||
      operands.queries.dim(0) * operands.group() >= kMostLength) {
    return 0;
  }
  // attend_H_D would read the keys of such heads, as of MLA, once for every one or two of them.
  // Always tiles: the bits of a row do not depend on the number of tokens.
  if (features > kernels::kTileFeatures16 && operands.group() >= kLeastWideGroup) return 1;
  return operands.options.determinism == Determinism::kBatchInvariant ? 0 : kLeastTileTokens;
}

int64_t TileRows(int64_t features) {
  if (features <= kernels::kTileFeatures32) return 32;
  return features <= kernels::kTileFeatures16 ? 16 : 8;
}

AttendPlan PlanTiles(const AttendOperands& operands, const DeviceShape& shape,
                     int64_t least_tokens) {
  AttendPlan plan;
  const int64_t features = Features(operands);
  plan.kernel = *std::ranges::find_if(
      kTileKernels, [&](const AttendKernel& kernel) { return kernel.features >= features; });
  const int64_t rows = operands.queries.dim(0);
  const int64_t group = operands.group();
  const int64_t tile_rows = TileRows(features);
  // The last tile of every sequence may be a part of one.
  const int64_t parts = std::min(operands.sequences(), rows / least_tokens);
  plan.indices = operands.sequences() == 1 ? CeilDivide(rows * group, tile_rows)
                                           : rows * group / tile_rows + parts;
  plan.indices_of_launch = IndicesOfLaunch(
      plan.indices,
      kMostTileOperations / AttendOperationsOf(operands, operands.kv_heads() * tile_rows));
  plan.least_tokens = least_tokens;
  // If single rows have a kernel of their own, the tiles may have no sequence at all.
  if (operands.sequences() > 1 && least_tokens > 1) return plan;
  const int64_t tile_tokens = std::min(CeilDivide(tile_rows, group) + 1, rows);
  SplitSegments(operands, shape, plan.indices * operands.kv_heads(),
                MostSegments(operands, tile_tokens), rows, &plan);
  return plan;
}

/// Appends the launch of `count` indices, and the merge of their segments.
Status LaunchPart(const AttendOperands& operands, const AttendPlan& plan, int64_t count,
                  const kernels::AttendParameters& p, CallContext* context) {
  const bool tiles = plan.kernel.heads == 0;
  const auto kv_heads = static_cast<uint32_t>(operands.kv_heads());
  KernelLaunch launch;
  launch.source = tiles ? "attend_tile.metal" : "attend.metal";
  launch.function = plan.kernel.function;
  launch.threads = kernels::kAttendThreads;
  if (tiles) {
    launch.threadgroups = {kv_heads, static_cast<uint32_t>(count),
                           static_cast<uint32_t>(plan.segments)};
  } else {
    launch.threadgroups = {kv_heads * static_cast<uint32_t>(plan.head_parts),
                           static_cast<uint32_t>(plan.segments), static_cast<uint32_t>(count)};
  }
  launch.other_parameters = ParameterBlock(p);
  SetConstants(operands, &launch);
  BindOperands(operands, context->workspace, plan.sums_bytes, &launch);
  const RowLimits limits{p.pages.rows, p.pages.blocks, p.pages.page_tokens};
  MARLIN_RETURN_IF_ERROR(BindReport(
      p.checks != 0,
      [limits](const ErrorWords::Word& report) { return RowReportError(report, limits); }, context,
      &launch));
  context->launches.push_back(launch);
  if (plan.segments > 1) {
    context->launches.push_back(MergeLaunch(operands, plan, launch, context->workspace));
  }
  return Status();
}

}  // namespace

bool TakesAttention(const AttendOperands& operands) {
  const auto fits = [](int64_t features) {
    return features > 0 && features <= kernels::kMostAttendFeatures;
  };
  if (!fits(KeyDim(operands)) || !fits(ValueDim(operands))) return false;
  if (operands.most_length() > kMostLength || operands.queries.dim(0) >= kMostRows) return false;
  // Launches have no two buffers that overlap, unless both are only read.
  const KernelBuffer out = BufferOf(MARLIN_BUFFER_ATTENDED, operands.out);
  const std::vector<KernelBuffer> read = ReadBuffers(operands);
  if (std::ranges::any_of(read, [&](const KernelBuffer& each) { return Overlap(out, each); })) {
    return false;
  }
  if (!operands.paged()) return true;
  const PagedCache& cache = *operands.cache;
  return cache.page_tokens % kernels::kBlockKeys == 0 && TakesSlabs(cache) &&
         operands.sequences() < kMostRows && operands.rows->block_tables.dim(1) < kMostRows;
}

AttendPlans PlanAttend(const AttendOperands& operands, const DeviceShape& shape) {
  const int64_t rows = operands.queries.dim(0);
  AttendPlans plans;
  const int64_t least_tokens = LeastTileTokens(operands, shape);
  if (least_tokens == 0 || rows < least_tokens) {
    plans.single = PlanSingle(operands, shape, rows);
    return plans;
  }
  plans.tiles = PlanTiles(operands, shape, least_tokens);
  const int64_t most_tokens = least_tokens - 1;
  if (operands.sequences() == 1 || most_tokens == 0) return plans;
  // The other sequences have fewer rows.
  const int64_t places = operands.sequences() * most_tokens;
  plans.single = PlanSingle(operands, shape, std::min(rows, places));
  plans.single.rows_of_sequence = rows > places ? most_tokens : 0;
  plans.single.most_tokens = most_tokens;
  return plans;
}

int64_t AttendWorkspaceBytes(const AttendOperands& operands, const DeviceShape& shape) {
  const AttendPlans plans = PlanAttend(operands, shape);
  return std::max(plans.single.sums_bytes, plans.tiles.sums_bytes);
}

Status LaunchAttention(const AttendOperands& operands, CallContext* context) {
  MARLIN_ASSIGN_OR_RETURN(kernels::AttendParameters p, ParametersOf(operands, context->driver));
  p.checks = operands.paged() ? 1 : 0;
  const AttendPlans plans = PlanAttend(operands, context->shape);
  for (const AttendPlan* plan : {&plans.tiles, &plans.single}) {
    p.head_parts = static_cast<int32_t>(plan->head_parts);
    p.segments = static_cast<int32_t>(plan->segments);
    p.least_tokens = static_cast<int32_t>(plan->least_tokens);
    p.most_tokens = static_cast<int32_t>(plan->most_tokens);
    p.rows_of_sequence = static_cast<int32_t>(plan->rows_of_sequence);
    for (int64_t first = 0; first < plan->indices; first += plan->indices_of_launch) {
      p.first_index = static_cast<int32_t>(first);
      const int64_t count = std::min(plan->indices_of_launch, plan->indices - first);
      MARLIN_RETURN_IF_ERROR(LaunchPart(operands, *plan, count, p, context));
      p.checks = 0;  // The first launch has checked all rows.
    }
  }
  return Status();
}

}  // namespace marlin::metal
