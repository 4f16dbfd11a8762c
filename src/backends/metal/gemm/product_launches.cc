#include "backends/metal/gemm/product_launches.h"

#include <algorithm>
#include <bit>

#include "backends/metal/gemm/row_parts.h"
#include "backends/metal/gemm/strip_layout.h"
#include "base/checked.h"

namespace marlin::metal {
namespace {

using kernels::GroupSpan;

/// Threads per threadgroup of marlin_finish, along n.
constexpr int64_t kFinishThreads = 256;
constexpr uint32_t kDequantizeSimdgroups = 4;

GroupSpan SpanOf(const WeightsSpec& spec) {
  if (!GetFormatInfo(spec.format).quantized) return kernels::kSpanNone;
  if (spec.group_size >= spec.k || spec.group_size % kernels::kChunkK == 0) {
    return kernels::kSpanChunk;
  }
  return kernels::kSpanBlock;
}

int GroupLog2Of(const WeightsSpec& spec) {
  if (!GetFormatInfo(spec.format).quantized) return 0;
  if (spec.group_size >= spec.k) return kernels::kOneGroup;
  const auto size = static_cast<uint64_t>(spec.group_size);
  return std::has_single_bit(size) ? std::countr_zero(size) : 0;
}

}  // namespace

FunctionConstants WeightConstants(const WeightsSpec& spec) {
  FunctionConstants constants{};
  constants[MARLIN_CONSTANT_CODE_KIND] = CodeKindOf(spec.format);
  constants[MARLIN_CONSTANT_CODE_BITS] = CodeBitsOf(spec);
  constants[MARLIN_CONSTANT_SCALE_TYPE] = ElementTypeOf(spec.scale_type);
  constants[MARLIN_CONSTANT_GROUP_EXTRA] =
      spec.has_zeros ? kernels::kExtraZeros
                     : (spec.has_biases ? kernels::kExtraBiases : kernels::kExtraNone);
  constants[MARLIN_CONSTANT_EXTRA_TYPE] = ElementTypeOf(ExtraDType(spec));
  constants[MARLIN_CONSTANT_GLOBAL_DIVIDES] = spec.global_scale_divides ? 1 : 0;
  constants[MARLIN_CONSTANT_GROUP_SPAN] = SpanOf(spec);
  constants[MARLIN_CONSTANT_GROUP_LOG2] = GroupLog2Of(spec);
  constants[MARLIN_CONSTANT_WHOLE_K] = spec.k % kernels::kChunkK == 0 ? 1 : 0;
  return constants;
}

FunctionConstants WeightConstants(const PreparedStrips& weights) {
  FunctionConstants constants = WeightConstants(weights.spec);
  constants[MARLIN_CONSTANT_INTEGER_ZEROS] = weights.has_integer_zeros() ? 1 : 0;
  return constants;
}

kernels::Parameters WeightParameters(const PreparedStrips& weights, int64_t expert) {
  const WeightsSpec& spec = weights.spec;
  kernels::Parameters parameters{};
  parameters.n = static_cast<int32_t>(spec.n);
  parameters.k = static_cast<int32_t>(spec.k);
  parameters.chunks = static_cast<int32_t>(weights.chunks());
  if (GetFormatInfo(spec.format).quantized) {
    parameters.groups = static_cast<int32_t>(GroupCount(spec));
    parameters.group_size = static_cast<int32_t>(std::min(spec.group_size, spec.k));
  }
  parameters.code_offset = CodeOffsetOf(spec.format);
  parameters.global_scale = weights.global_scale(expert);
  return parameters;
}

int64_t ExtentBytes(int64_t rows, int64_t columns, int64_t stride, DType type,
                    int64_t column_stride) {
  if (rows == 0) return 0;
  return ((rows - 1) * stride + (columns - 1) * column_stride + 1) * DTypeBytes(type);
}

namespace {

/// Binds the weights. Arrays that a format does not have are bound to the codes, and not read.
void BindWeights(const PreparedStrips& weights, int64_t expert, KernelLaunch* launch) {
  const StripPart codes = weights.codes(expert);
  const auto bind = [&](int index, const StripPart& part) {
    const StripPart& bound = part.bytes > 0 ? part : codes;
    launch->buffers.push_back({index, bound.data, bound.bytes});
  };
  bind(MARLIN_BUFFER_CODES, codes);
  bind(MARLIN_BUFFER_SCALES, weights.scales(expert));
  bind(MARLIN_BUFFER_EXTRAS, weights.extras(expert));
  bind(MARLIN_BUFFER_TABLE, weights.table());
}

/// Launch parameters shared by dequantization and embedding lookup: one chunk per simdgroup.
KernelLaunch DecodingLaunch(const PreparedStrips& strips, int64_t expert,
                            const MutableTensorView& out, int64_t rows, int64_t columns) {
  KernelLaunch launch;
  launch.constants = WeightConstants(strips);
  launch.constants[MARLIN_CONSTANT_OUTPUT_TYPE] = ElementTypeOf(out.dtype());
  launch.parameters = WeightParameters(strips, expert);
  launch.parameters.output_stride = out.stride(0);
  launch.parameters.output_column_stride = out.stride(1);
  BindWeights(strips, expert, &launch);
  const int64_t bytes = ExtentBytes(rows, columns, out.stride(0), out.dtype(), out.stride(1));
  launch.buffers.push_back({MARLIN_BUFFER_OUTPUT, out.data(), bytes, true, false});
  const int64_t groups = CeilDivide(strips.chunks(), int64_t{kDequantizeSimdgroups});
  launch.threadgroups[0] = static_cast<uint32_t>(groups);
  launch.threads = kDequantizeSimdgroups * kernels::kLanes;
  return launch;
}

KernelBuffer OutputOf(const GemmCall& call) {
  const int64_t columns = call.desc.gated ? call.desc.n / 2 : call.desc.n;
  return {MARLIN_BUFFER_OUTPUT, call.c,
          ExtentBytes(call.desc.m, columns, call.c_stride, call.desc.c_type), true, false};
}

// Activate in kernels/epilogue.h switches on these numbers.
static_assert(static_cast<int>(Activation::kNone) == 0);
static_assert(static_cast<int>(Activation::kSilu) == 1);
static_assert(static_cast<int>(Activation::kGeluTanh) == 2);
static_assert(static_cast<int>(Activation::kRelu) == 3);

/// Sets constants and buffers of the epilogue. Absent operands are bound to the codes.
void SetEpilogue(const GemmCall& call, KernelLaunch* launch) {
  const auto& weights = static_cast<const PreparedStrips&>(*call.weights);
  const Epilogue& epilogue = call.epilogue;
  const StripPart codes = weights.codes(call.expert);
  FunctionConstants& constants = launch->constants;
  constants[MARLIN_CONSTANT_OUTPUT_TYPE] = ElementTypeOf(call.desc.c_type);
  constants[MARLIN_CONSTANT_BIAS_TYPE] = ElementTypeOf(epilogue.bias_type);
  constants[MARLIN_CONSTANT_HAS_BIAS] = epilogue.bias != nullptr ? 1 : 0;
  constants[MARLIN_CONSTANT_ACTIVATION] = static_cast<int32_t>(call.desc.activation);
  constants[MARLIN_CONSTANT_HAS_ROW_WEIGHT] = epilogue.row_weight != nullptr ? 1 : 0;
  constants[MARLIN_CONSTANT_GATED] = call.desc.gated ? 1 : 0;
  const auto bind = [&](int index, const void* data, int64_t bytes) {
    launch->buffers.push_back(data != nullptr ? KernelBuffer{index, data, bytes}
                                              : KernelBuffer{index, codes.data, codes.bytes});
  };
  bind(MARLIN_BUFFER_BIAS, epilogue.bias, call.desc.n * DTypeBytes(epilogue.bias_type));
  bind(MARLIN_BUFFER_ROW_WEIGHT, epilogue.row_weight, call.desc.m * int64_t{sizeof(float)});
}

/// The main loop's launch.
KernelLaunch SumsOf(const GemmCall& call, const LaunchPlan& plan) {
  const auto& weights = static_cast<const PreparedStrips&>(*call.weights);
  KernelLaunch launch;
  launch.source = plan.source;
  launch.function = plan.function;
  launch.threadgroups = plan.threadgroups;
  launch.threads = plan.threads;
  launch.operations = OperationsOf(call.desc);
  launch.constants = WeightConstants(weights);
  launch.constants[MARLIN_CONSTANT_INPUT_TYPE] = ElementTypeOf(call.desc.a_type);
  launch.constants[MARLIN_CONSTANT_ALIGNED_INPUT] = call.desc.aligned ? 1 : 0;
  launch.constants[MARLIN_CONSTANT_WHOLE_M] = call.desc.m % plan.rows == 0 ? 1 : 0;
  launch.constants[MARLIN_CONSTANT_PARTIAL] = plan.partial ? 1 : 0;
  launch.parameters = WeightParameters(weights, call.expert);
  launch.parameters.m = static_cast<int32_t>(call.desc.m);
  launch.parameters.input_stride = call.a_stride;
  launch.parameters.output_stride = call.c_stride;
  launch.parameters.splits = plan.splits;
  launch.parameters.steps_of_split = plan.steps_of_split;
  launch.parameters.units = plan.units;
  launch.parameters.units_of_group = plan.units_of_group;
  BindWeights(weights, call.expert, &launch);
  launch.buffers.push_back(
      {MARLIN_BUFFER_INPUT, call.a,
       ExtentBytes(call.desc.m, call.desc.k, call.a_stride, call.desc.a_type)});
  SetEpilogue(call, &launch);
  if (plan.partial) {
    // marlin_finish applies the epilogue.
    launch.constants[MARLIN_CONSTANT_HAS_BIAS] = 0;
    launch.constants[MARLIN_CONSTANT_HAS_ROW_WEIGHT] = 0;
    launch.buffers.push_back(
        {MARLIN_BUFFER_OUTPUT, call.workspace, PartialBytes(plan, call.desc), true, plan.zeroes});
  } else {
    launch.buffers.push_back(OutputOf(call));
  }
  return launch;
}

/// Clears the partials that no work unit writes, because it continues the previous unit of its
/// threadgroup. Precondition: the workspace is the last buffer of `sums`.
KernelLaunch ZeroesOf(const KernelLaunch& sums, const LaunchPlan& plan) {
  KernelLaunch launch;
  launch.source = sums.source;
  launch.function = "marlin_zero_reduction";
  launch.constants = sums.constants;
  launch.parameters = sums.parameters;
  launch.buffers = {sums.buffers.back()};
  launch.buffers.back().cleared = false;
  launch.threadgroups = {static_cast<uint32_t>(plan.units), 1, 1};
  launch.threads = static_cast<uint32_t>(kFinishThreads);
  return launch;
}

KernelLaunch FinishOf(const GemmCall& call, const KernelLaunch& sums) {
  KernelLaunch launch;
  launch.source = "finish.metal";
  launch.function = "marlin_finish";
  launch.parameters = sums.parameters;
  SetEpilogue(call, &launch);
  const KernelBuffer& partials = sums.buffers.back();
  launch.buffers.push_back({MARLIN_BUFFER_PARTIALS, partials.data, partials.bytes});
  launch.buffers.push_back(OutputOf(call));
  const int64_t columns = call.desc.gated ? call.desc.n / 2 : call.desc.n;
  launch.threadgroups = {static_cast<uint32_t>(CeilDivide(columns, kFinishThreads)),
                         static_cast<uint32_t>(call.desc.m), 1};
  launch.threads = static_cast<uint32_t>(kFinishThreads);
  return launch;
}

}  // namespace

GemmLaunches LaunchesOf(const LaunchPlan& plan, const GemmCall& call) {
  const KernelLaunch sums = SumsOf(call, plan);
  GemmLaunches launches;
  if (plan.zeroes) launches.push_back(ZeroesOf(sums, plan));
  launches.push_back(sums);
  if (plan.partial) launches.push_back(FinishOf(call, sums));
  return launches;
}

KernelLaunch DequantizeLaunch(const PreparedStrips& weights, int64_t expert,
                              const MutableTensorView& out) {
  const WeightsSpec& spec = weights.spec;
  KernelLaunch launch = DecodingLaunch(weights, expert, out, spec.k, spec.n);
  launch.source = "dequantize.metal";
  launch.function = "marlin_dequantize";
  launch.threadgroups[1] = static_cast<uint32_t>(weights.strips());
  return launch;
}

KernelLaunch LookUpLaunch(const PreparedStrips& weights, const MutableTensorView& out) {
  const int64_t rows = out.dim(0);
  KernelLaunch launch = DecodingLaunch(weights, 0, out, rows, weights.spec.k);
  launch.source = "look_up.metal";
  launch.function = "marlin_look_up";
  launch.threadgroups[1] = static_cast<uint32_t>(rows);
  return launch;
}

}  // namespace marlin::metal
