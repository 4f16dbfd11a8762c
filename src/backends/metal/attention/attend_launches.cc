#include "backends/metal/attention/attend_launches.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "backends/metal/attention/row_report.h"
#include "backends/metal/gemm/row_parts.h"
#include "backends/metal/gemm/strip_layout.h"
#include "backends/metal/kernels/attend_parameters.h"
#include "base/checked.h"
#include "base/errors.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

/// With few features first, then few heads.
constexpr AttendKernel kKernels[] = {
    {"attend_1_64", 1, 64},    {"attend_4_64", 4, 64},   {"attend_8_64", 8, 64},
    {"attend_1_128", 1, 128},  {"attend_4_128", 4, 128}, {"attend_8_128", 8, 128},
    {"attend_1_256", 1, 256},  {"attend_4_256", 4, 256}, {"attend_1_512", 1, 512},
    {"attend_2_512", 2, 512},  {"attend_1_1024", 1, 1024},
};
static_assert(std::end(kKernels)[-1].features == kernels::kMostAttendFeatures);

/// Positions, with room for a segment beyond the last one.
constexpr int64_t kMostLength = std::numeric_limits<int32_t>::max() - 2 * kernels::kSegmentKeys;
/// As the places of kernels/check_rows.h.
constexpr int64_t kMostRows = int64_t{1} << 28;
/// With fewer threadgroups per core than these the segments of a row have threadgroups of their
/// own.
constexpr int64_t kThreadgroupsOfCore = 4;
/// The dot products of single rows reach a quarter of the operations that matrix products do.
constexpr int64_t kMostOperations = kMostOperationsOfPart / 4;

int64_t KeyDim(const AttendOperands& operands) { return operands.queries.dim(2); }
int64_t ValueDim(const AttendOperands& operands) { return operands.out.dim(2); }

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

/// Segments that a row has at most: its keys may begin and end in any place of one.
int64_t MostSegments(const AttendOperands& operands) {
  constexpr int64_t kKeys = kernels::kSegmentKeys;
  const int64_t of_length = CeilDivide(operands.most_length(), kKeys);
  const int64_t of_row = CeilDivide(MostVisible(operands) + kKeys - 1, kKeys);
  return std::max<int64_t>(std::min(of_length, of_row), 1);
}

/// From the first to the last element of a view.
KernelBuffer BufferOf(int index, const TensorView& view) {
  int64_t last = 0;
  for (int i = 0; i < view.rank(); ++i) last += (view.dim(i) - 1) * view.stride(i);
  return {index, view.data(), view.ElementCount() == 0 ? 0 : (last + 1) * DTypeBytes(view.dtype())};
}

KernelBuffer Written(KernelBuffer buffer) {
  buffer.written = true;
  buffer.cleared = false;
  return buffer;
}

/// Whether every four features are aligned to their size: those of vectors from an address on, with
/// strides in elements.
bool QuadsAligned(const void* data, DType type, std::initializer_list<int64_t> strides) {
  const auto bytes = static_cast<uintptr_t>(4 * DTypeBytes(type));
  return reinterpret_cast<uintptr_t>(data) % bytes == 0 &&
         std::ranges::all_of(strides, [](int64_t stride) { return stride % 4 == 0; });
}

bool KeysAligned(const AttendOperands& operands) {
  const int64_t key_dim = KeyDim(operands);
  const int64_t value_dim = ValueDim(operands);
  if (key_dim % 4 != 0 || value_dim % 4 != 0) return false;
  if (!operands.paged()) {
    const auto aligned = [](const TensorView& view) {
      return QuadsAligned(view.data(), view.dtype(), {view.stride(0), view.stride(1)});
    };
    return aligned(operands.keys) && aligned(operands.values);
  }
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
  constants[MARLIN_CONSTANT_ALIGNED_INPUT] =
      KeyDim(operands) % 4 == 0 &&
      QuadsAligned(queries.data(), queries.dtype(), {queries.stride(0), queries.stride(1)});
  constants[MARLIN_CONSTANT_OUTPUT_TYPE] = ElementTypeOf(operands.out.dtype());
  constants[MARLIN_CONSTANT_KEY_TYPE] =
      ElementTypeOf(paged ? operands.cache->type : operands.keys.dtype());
  constants[MARLIN_CONSTANT_VALUE_TYPE] =
      ElementTypeOf(paged ? operands.cache->type : operands.values.dtype());
  constants[MARLIN_CONSTANT_PAGED_KEYS] = paged ? 1 : 0;
  constants[MARLIN_CONSTANT_ALIGNED_KEYS] = KeysAligned(operands) ? 1 : 0;
}

/// The rows, pages and slabs of a paged cache.
Status SetPages(const AttendOperands& operands, const Driver& driver,
                kernels::AttendParameters* p) {
  const PagedCache& cache = *operands.cache;
  kernels::PagedRows& pages = p->pages;
  pages.page_stride = cache.page_stride;
  pages.first_element = cache.first_element;
  pages.sequences = static_cast<int32_t>(operands.sequences());
  pages.blocks = static_cast<int32_t>(operands.rows->block_tables.dim(1));
  pages.page_tokens = static_cast<int32_t>(cache.page_tokens);
  // No page number is larger.
  pages.slab_pages = static_cast<int32_t>(
      std::min<int64_t>(cache.slab_pages, std::numeric_limits<int32_t>::max()));
  pages.slab_count = static_cast<int32_t>(cache.slabs.size());
  for (size_t i = 0; i < cache.slabs.size(); ++i) {
    if (cache.slabs[i] == nullptr) continue;
    const uint64_t address = driver.AddressOf(cache.slabs[i]);
    if (address == 0) return Invalid("cache: a slab is not memory of the device");
    pages.slabs[i] = static_cast<int64_t>(address);
  }
  p->key_stride = cache.key_dim;
  p->key_head_stride = cache.page_tokens * cache.key_dim;
  p->value_stride = cache.values_in_keys ? cache.key_dim : cache.value_dim;
  p->value_head_stride = cache.page_tokens * p->value_stride;
  p->first_value = cache.values_in_keys ? 0 : cache.kv_heads * p->key_head_stride;
  return Status();
}

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
  p.least_tokens = 1;
  p.most_tokens = std::numeric_limits<int32_t>::max();
  p.softcap = options.softcap;
  const float scale =
      options.scale != 0.0F ? options.scale : 1.0F / std::sqrt(static_cast<float>(p.key_dim));
  p.query_scale =
      options.softcap != 0.0F ? scale : static_cast<float>(double{scale} * std::numbers::log2e);
  p.pages.rows = static_cast<int32_t>(operands.queries.dim(0));
  if (operands.paged()) {
    MARLIN_RETURN_IF_ERROR(SetPages(operands, driver, &p));
  } else {
    SetTensors(operands, &p);
  }
  return p;
}

/// Binds what all kernels read and write; absent buffers are bound to the queries.
void BindOperands(const AttendOperands& operands, void* sums, int64_t sums_bytes,
                  KernelLaunch* launch) {
  const KernelBuffer queries = BufferOf(MARLIN_BUFFER_QUERIES, operands.queries);
  const auto absent = [&](int index) { return KernelBuffer{index, queries.data, queries.bytes}; };
  const auto bind = [&](int index, const TensorView* view) {
    launch->buffers.push_back(view == nullptr || view->empty() ? absent(index)
                                                               : BufferOf(index, *view));
  };
  launch->buffers.push_back(queries);
  const bool paged = operands.paged();
  bind(MARLIN_BUFFER_KEYS, &operands.keys);
  bind(MARLIN_BUFFER_VALUES, &operands.values);
  launch->buffers.push_back(Written(BufferOf(MARLIN_BUFFER_ATTENDED, operands.out)));
  bind(MARLIN_BUFFER_SINKS, &operands.options.sinks);
  launch->buffers.push_back(sums_bytes == 0
                                ? absent(MARLIN_BUFFER_SUMS)
                                : Written({MARLIN_BUFFER_SUMS, sums, sums_bytes}));
  bind(MARLIN_BUFFER_POSITIONS, paged ? &operands.rows->positions : nullptr);
  bind(MARLIN_BUFFER_FIRST_ROWS, paged ? &operands.rows->first_rows : nullptr);
  bind(MARLIN_BUFFER_BLOCK_TABLES, paged ? &operands.rows->block_tables : nullptr);
  if (!paged) return;
  const PagedCache& cache = *operands.cache;
  for (const void* const slab : cache.slabs) {
    if (slab == nullptr) continue;
    launch->addressed.push_back(
        {slab, cache.slab_pages * cache.page_stride * DTypeBytes(cache.type), false});
  }
}

Status BindReport(const AttendOperands& operands, bool checks, CallContext* context,
                  KernelLaunch* launch) {
  if (checks) {
    const kernels::PagedRows& pages =
        launch->other_parameters.As<kernels::AttendParameters>().pages;
    return BindRowReport({pages.rows, pages.blocks, pages.page_tokens}, context, launch);
  }
  const KernelBuffer queries = BufferOf(MARLIN_BUFFER_ROW_ERROR, operands.queries);
  launch->buffers.push_back(queries);
  launch->buffers.push_back({MARLIN_BUFFER_ERROR_NUMBERS, queries.data, queries.bytes});
  return Status();
}

KernelLaunch MergeLaunch(const AttendOperands& operands, const KernelLaunch& attend, void* sums,
                         int64_t sums_bytes) {
  KernelLaunch launch;
  launch.source = attend.source;
  launch.function = "attend_merge";
  launch.constants = attend.constants;
  launch.other_parameters = attend.other_parameters;
  launch.threads = kernels::kMergeThreads;
  launch.threadgroups = {static_cast<uint32_t>(operands.queries.dim(1)), 1, attend.threadgroups[2]};
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
  launch.buffers.push_back({MARLIN_BUFFER_SUMS, sums, sums_bytes});
  return launch;
}

}  // namespace

bool TakesAttention(const AttendOperands& operands) {
  const auto fits = [](int64_t features) {
    return features > 0 && features <= kernels::kMostAttendFeatures;
  };
  if (!fits(KeyDim(operands)) || !fits(ValueDim(operands))) return false;
  if (operands.most_length() > kMostLength || operands.queries.dim(0) >= kMostRows) return false;
  if (!operands.paged()) return true;
  const PagedCache& cache = *operands.cache;
  return cache.page_tokens % kernels::kBlockKeys == 0 &&
         std::ssize(cache.slabs) <= kernels::kMostSlabs && operands.sequences() < kMostRows &&
         operands.rows->block_tables.dim(1) < kMostRows;
}

AttendPlan PlanAttend(const AttendOperands& operands, const DeviceShape& shape) {
  AttendPlan plan;
  const int64_t group = operands.group();
  plan.kernel = KernelFor(group, std::max(KeyDim(operands), ValueDim(operands)));
  plan.head_parts = CeilDivide(group, plan.kernel.heads);
  plan.indices = operands.queries.dim(0);
  const int64_t operations = 2 * operands.queries.dim(1) * (KeyDim(operands) + ValueDim(operands)) *
                             std::max<int64_t>(MostVisible(operands), 1);
  plan.indices_of_launch =
      std::clamp<int64_t>(kMostOperations / operations, 1, std::max<int64_t>(plan.indices, 1));
  const int64_t threadgroups = plan.indices * operands.kv_heads() * plan.head_parts;
  const int64_t segments = MostSegments(operands);
  if (segments > 1 && threadgroups < kThreadgroupsOfCore * shape.cores &&
      plan.indices_of_launch == plan.indices) {
    plan.segments = segments;
    plan.sums_bytes = plan.indices * operands.queries.dim(1) * segments *
                      kernels::PartialFloats(static_cast<int32_t>(ValueDim(operands))) *
                      int64_t{sizeof(float)};
  }
  return plan;
}

int64_t AttendWorkspaceBytes(const AttendOperands& operands, const DeviceShape& shape) {
  return PlanAttend(operands, shape).sums_bytes;
}

Status LaunchAttention(const AttendOperands& operands, CallContext* context) {
  MARLIN_ASSIGN_OR_RETURN(kernels::AttendParameters p, ParametersOf(operands, context->driver));
  const AttendPlan plan = PlanAttend(operands, context->shape);
  p.head_parts = static_cast<int32_t>(plan.head_parts);
  p.segments = static_cast<int32_t>(plan.segments);
  for (int64_t first = 0; first < plan.indices; first += plan.indices_of_launch) {
    const int64_t count = std::min(plan.indices_of_launch, plan.indices - first);
    p.first_index = static_cast<int32_t>(first);
    p.checks = first == 0 && operands.paged() ? 1 : 0;
    KernelLaunch launch;
    launch.source = "attend.metal";
    launch.function = plan.kernel.function;
    launch.threads = kernels::kAttendThreads;
    launch.threadgroups = {static_cast<uint32_t>(operands.kv_heads() * plan.head_parts),
                           static_cast<uint32_t>(plan.segments), static_cast<uint32_t>(count)};
    launch.other_parameters = ParameterBlock(p);
    SetConstants(operands, &launch);
    BindOperands(operands, context->workspace, plan.sums_bytes, &launch);
    MARLIN_RETURN_IF_ERROR(BindReport(operands, p.checks != 0, context, &launch));
    context->launches.push_back(launch);
    if (plan.segments == 1) continue;
    context->launches.push_back(
        MergeLaunch(operands, launch, context->workspace, plan.sums_bytes));
  }
  return Status();
}

}  // namespace marlin::metal
