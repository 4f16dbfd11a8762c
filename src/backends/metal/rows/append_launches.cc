// The launch of kernels/rows_append.metal.
#include <limits>
#include <utility>

#include "backends/metal/attention/attend_launches.h"
#include "backends/metal/attention/launch_buffers.h"
#include "backends/metal/attention/row_report.h"
#include "backends/metal/decoder/operations.h"
#include "backends/metal/gemm/strip_layout.h"
#include "backends/metal/kernels/rows/append_parameters.h"
#include "backends/metal/rows/row_views.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

/// RotateAndAppendCall, or AppendToCacheCall, which has no queries, norms and frequencies.
struct AppendOperands {
  MutableTensorView queries;
  TensorView keys;
  TensorView values;  ///< Empty: in the keys.
  const HeadNorms& norms;
  const RotaryEmbedding& rotary;
  const SequenceRows& rows;
  const PagedCache& cache;
};

/// As the places of kernels/check_rows.h.
constexpr int64_t kMostPlaces = int64_t{1} << 28;

bool FitsPages(const SequenceRows& rows, const PagedCache& cache) {
  const int64_t blocks = rows.block_tables.dim(1);
  return TakesSlabs(cache) && rows.positions.dim(0) < kMostPlaces &&
         rows.first_rows.dim(0) <= kMostPlaces && blocks < kMostPlaces &&
         blocks * cache.page_tokens <= std::numeric_limits<int32_t>::max();
}

bool FitsOperands(const AppendOperands& append) {
  return Fits(append.keys) && (append.values.empty() || Fits(append.values)) &&
         FitsPages(append.rows, append.cache) && (append.queries.empty() || Fits(append.queries));
}

Status SetParameters(const AppendOperands& append, const Driver& driver,
                     kernels::AppendParameters* p) {
  const PagedCache& cache = append.cache;
  MARLIN_RETURN_IF_ERROR(SetPages(append.rows, cache, driver, &p->cache));
  p->cache.kv_heads = static_cast<int32_t>(cache.kv_heads);
  p->cache.key_dim = static_cast<int32_t>(cache.key_dim);
  p->cache.value_dim = static_cast<int32_t>(cache.value_dim);
  p->cache.window = 1;  // Rows need the pages of their own positions only.
  p->rotary = RotaryOf(append.rotary);
  p->heads = append.queries.empty() ? 0 : static_cast<int32_t>(append.queries.dim(1));
  p->value_heads = append.values.empty() ? 0 : p->cache.kv_heads;
  p->epsilon = append.norms.epsilon;
  p->one = 1.0F;
  return Status();
}

kernels::HeadNorm BindNorm(int index, const TensorView& norm, KernelLaunch* launch) {
  launch->buffers.push_back(OperandOf(index, norm));
  return {norm.empty() ? 0 : 1, ElementTypeOf(norm.dtype())};
}

void SetTypes(const AppendOperands& append, KernelLaunch* launch) {
  FunctionConstants& constants = launch->constants;
  constants[MARLIN_CONSTANT_INPUT_TYPE] = ElementTypeOf(append.queries.dtype());
  constants[MARLIN_CONSTANT_EXTRA_TYPE] = ElementTypeOf(append.keys.dtype());
  constants[MARLIN_CONSTANT_BIAS_TYPE] = ElementTypeOf(append.values.dtype());
  constants[MARLIN_CONSTANT_KEY_TYPE] = ElementTypeOf(append.cache.type);
}

Status LaunchAppend(const AppendOperands& append, CallContext* context) {
  kernels::AppendParameters p{};
  MARLIN_RETURN_IF_ERROR(SetParameters(append, context->driver, &p));
  KernelLaunch launch;
  launch.source = "rows_append.metal";
  launch.function = "rotate_append";
  SetTypes(append, &launch);
  const int64_t heads = int64_t{p.heads} + p.cache.kv_heads + p.value_heads;
  launch.threads = kernels::kAttendThreads;
  launch.threadgroups[0] =
      static_cast<uint32_t>(CeilDivide(heads, int64_t{kernels::kAttendSimdgroups}));
  launch.threadgroups[1] = static_cast<uint32_t>(append.keys.dim(0) + 1);
  BindRows({{MARLIN_BUFFER_NEW_KEYS, append.keys, &p.keys},
            {MARLIN_BUFFER_NEW_VALUES, append.values, &p.values}},
           append.queries, Use::kChanged, &p.queries, &launch);
  p.query_norm = BindNorm(MARLIN_BUFFER_QUERY_NORM, append.norms.queries, &launch);
  p.key_norm = BindNorm(MARLIN_BUFFER_KEY_NORM, append.norms.keys, &launch);
  launch.buffers.push_back(OperandOf(MARLIN_BUFFER_FREQUENCIES, append.rotary.inverse_frequencies));
  launch.buffers.push_back(OperandOf(MARLIN_BUFFER_POSITIONS, append.rows.positions));
  launch.buffers.push_back(OperandOf(MARLIN_BUFFER_FIRST_ROWS, append.rows.first_rows));
  launch.buffers.push_back(OperandOf(MARLIN_BUFFER_BLOCK_TABLES, append.rows.block_tables));
  AddressSlabs(append.cache, &launch, true);
  const kernels::PagedRows& pages = p.cache.pages;
  const RowLimits limits{pages.rows, pages.blocks, pages.page_tokens};
  const auto error_of = [limits](const ErrorWords::Word& report) {
    return RowReportError(report, limits);
  };
  MARLIN_RETURN_IF_ERROR(BindReport(true, error_of, context, &launch));
  launch.other_parameters = ParameterBlock(p);
  context->launches.push_back(std::move(launch));
  return Status();
}

AppendOperands AppendOf(const RotateAndAppendCall& call) {
  return {call.heads.queries, call.heads.keys, call.heads.values, call.norms,
          call.rotary,        call.rows,       call.cache};
}

constexpr HeadNorms kNoNorms;
constexpr RotaryEmbedding kNoRotary;

AppendOperands AppendOf(const AppendToCacheCall& call) {
  const bool values_in_keys = call.cache.values_in_keys;
  return {{},        call.keys, values_in_keys ? TensorView() : call.values, kNoNorms, kNoRotary,
          call.rows, call.cache};
}

/// Whether the norms add squares in the order of a norm of its own.
bool FusesNorms(const RotateAndAppendCall& call) {
  return (call.norms.queries.empty() && call.norms.keys.empty()) ||
         call.cache.key_dim <= kernels::kNarrowColumns;
}

}  // namespace

bool Takes(const AppendToCacheCall& call, const DeviceShape& /*shape*/) {
  return FitsOperands(AppendOf(call));
}

Status Launch(const AppendToCacheCall& call, CallContext* context) {
  return LaunchAppend(AppendOf(call), context);
}

bool Takes(const RotateAndAppendCall& call, const DeviceShape& /*shape*/) {
  return FitsOperands(AppendOf(call));
}

Status Launch(const RotateAndAppendCall& call, CallContext* context) {
  if (FusesNorms(call)) return LaunchAppend(AppendOf(call), context);
  return RunUnfused(call, [&](const auto& part) { return Launch(part, context); });
}

}  // namespace marlin::metal
