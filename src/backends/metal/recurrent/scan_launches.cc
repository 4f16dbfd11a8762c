// The gated delta rule and Mamba-2: the convolution of all rows, the recurrence row by row, then
// norms and gates. Rows have the same bits however sequences are divided into calls.
#include <algorithm>
#include <iterator>

#include "backends/metal/gemm/strip_layout.h"
#include "backends/metal/recurrent/recurrent_views.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

/// The operands that both operations have.
struct ScanOperands {
  ConvOperands conv;
  const RecurrentRows& rows;
  const RecurrentStates& states;
  MutableTensorView out;  ///< [rows, heads, columns]
  TensorView writes;
  TensorView decays;  ///< May be absent, as skips.
  TensorView log_decays;
  TensorView biases;
  TensorView skips;
  TensorView gates;
  TensorView norm;  ///< May have no data.
  kernels::ScanParameters scan = {};
  kernels::MixerFinishParameters finish = {};
};

struct ScanKernel {
  int64_t state_rows;
  const char* delta;
  const char* mamba2;
};
constexpr ScanKernel kScanKernels[] = {{32, "recurrent_delta_1", "recurrent_mamba2_1"},
                                       {64, "recurrent_delta_2", "recurrent_mamba2_2"},
                                       {128, "recurrent_delta_4", "recurrent_mamba2_4"},
                                       {256, "recurrent_delta_8", "recurrent_mamba2_8"}};
static_assert(std::end(kScanKernels)[-1].state_rows == kernels::kMostStateRows);

const ScanKernel& ScanKernelOf(int64_t state_rows) {
  return *std::ranges::find_if(
      kScanKernels, [&](const ScanKernel& kernel) { return kernel.state_rows >= state_rows; });
}

/// Bytes of the results of the convolution, which come first in the workspace.
int64_t MixedBytes(int64_t rows, int64_t channels) {
  return RoundUp(rows * channels * int64_t{sizeof(float)}, kBufferAlignment);
}

int64_t ScratchBytes(const TensorView& out, int64_t channels) {
  return MixedBytes(out.dim(0), channels) + out.ElementCount() * int64_t{sizeof(float)};
}

/// Sets the sizes of the heads of keys and values.
void SetHeads(int64_t group, int64_t state_rows, ScanOperands* operands) {
  const TensorView& out = operands->out;
  kernels::ScanParameters& scan = operands->scan;
  scan.heads = static_cast<int32_t>(out.dim(1));
  scan.columns = static_cast<int32_t>(out.dim(2));
  scan.group = static_cast<int32_t>(group);
  scan.state_rows = static_cast<int32_t>(state_rows);
  scan.writes = HeadStridesOf(operands->writes);
  kernels::MixerFinishParameters& finish = operands->finish;
  finish.out = HeadStridesOf(out);
  finish.gates = HeadStridesOf(operands->gates);
  finish.rows = static_cast<int32_t>(out.dim(0));
  finish.heads = scan.heads;
  finish.columns = scan.columns;
}

ScanOperands OperandsOf(const GatedDeltaCall& call) {
  const GatedDeltaInputs& inputs = call.inputs;
  const GatedDeltaSizes& sizes = call.sizes;
  const GatedDeltaWeights& weights = call.weights;
  ScanOperands operands{{{inputs.queries, inputs.keys, inputs.values},
                         weights.conv,
                         {},
                         sizes.channels(),
                         sizes.conv_width},
                        call.rows,
                        call.states,
                        call.out,
                        inputs.writes,
                        inputs.decays,
                        weights.log_decay,
                        weights.decay_bias,
                        {},
                        inputs.gates,
                        weights.norm};
  const int64_t group = sizes.value_heads / sizes.key_heads;
  SetHeads(group, sizes.key_dim, &operands);
  const int64_t key_channels = sizes.key_heads * sizes.key_dim;
  operands.scan.decays = HeadStridesOf(inputs.decays);
  operands.scan.first_keys = static_cast<int32_t>(key_channels);
  operands.scan.first_values = static_cast<int32_t>(2 * key_channels);
  operands.finish.gate_group = static_cast<int32_t>(group);
  operands.finish.norm_heads = 1;
  operands.finish.has_norm = 1;
  operands.finish.shares_norm = 1;
  operands.finish.norm_before_gate = 1;
  operands.finish.epsilon = weights.epsilon;
  return operands;
}

ScanOperands OperandsOf(const Mamba2Call& call) {
  const Mamba2Inputs& inputs = call.inputs;
  const Mamba2Sizes& sizes = call.sizes;
  const Mamba2Weights& weights = call.weights;
  ScanOperands operands{{{inputs.values, inputs.keys, inputs.queries},
                         weights.conv,
                         weights.conv_bias,
                         sizes.channels(),
                         sizes.conv_width},
                        call.rows,
                        call.states,
                        call.out,
                        inputs.steps,
                        {},
                        weights.log_decay,
                        weights.step_bias,
                        weights.skip,
                        inputs.gates,
                        weights.norm};
  const int64_t group = sizes.heads / sizes.groups;
  SetHeads(group, sizes.state_size, &operands);
  operands.scan.first_keys = static_cast<int32_t>(sizes.features());
  operands.scan.first_queries =
      static_cast<int32_t>(sizes.features() + sizes.groups * sizes.state_size);
  operands.scan.min_step = weights.min_step;
  operands.scan.max_step = weights.max_step;
  operands.finish.gate_group = 1;
  operands.finish.norm_heads = static_cast<int32_t>(group);
  operands.finish.has_norm = weights.norm.empty() ? 0 : 1;
  operands.finish.norm_before_gate = weights.norm_before_gate ? 1 : 0;
  operands.finish.epsilon = weights.epsilon;
  return operands;
}

Status LaunchScan(const ScanOperands& operands, const char* function, const float* mixed,
                  float* sums, CallContext* context) {
  const RecurrentRows& rows = operands.rows;
  const kernels::ScanParameters& p = operands.scan;
  const int64_t slices = CeilDivide(p.columns, kernels::kSliceColumns);
  KernelLaunch launch =
      SequenceLaunch("recurrent_scan.metal", function, rows, p.heads * slices, p.places.sequences);
  launch.other_parameters = ParameterBlock(p);
  BindInputs(operands.conv, rows, &launch);
  MARLIN_RETURN_IF_ERROR(BindSequenceErrors(rows, context, &launch));
  const auto floats = [&](int index, const float* data, int64_t count) {
    KernelBuffer buffer = {index, data, count * int64_t{sizeof(float)}};
    return count > 0 ? buffer : BoundOr(index, {}, rows.first_rows);
  };
  const int64_t count = p.places.rows;
  launch.buffers.push_back(floats(MARLIN_BUFFER_MIXED, mixed, count * p.conv.channels));
  launch.buffers.push_back(floats(MARLIN_BUFFER_MIXER_SUMS, sums, count * p.heads * p.columns));
  launch.buffers.back().written = count > 0;
  launch.buffers.back().cleared = count == 0;
  const auto bind = [&](int index, const TensorView& view) {
    launch.buffers.push_back(BoundOr(index, view, rows.first_rows));
  };
  bind(MARLIN_BUFFER_MIXER_WRITES, operands.writes);
  bind(MARLIN_BUFFER_MIXER_DECAYS, operands.decays);
  bind(MARLIN_BUFFER_LOG_DECAYS, operands.log_decays);
  bind(MARLIN_BUFFER_DECAY_BIASES, operands.biases);
  bind(MARLIN_BUFFER_MIXER_SKIPS, operands.skips);
  ReachStates(operands.states, true, &launch);
  context->launches.push_back(std::move(launch));
  return Status();
}

void LaunchFinish(const ScanOperands& operands, const float* sums, CallContext* context) {
  const kernels::MixerFinishParameters& p = operands.finish;
  if (p.rows == 0) return;
  KernelLaunch launch;
  launch.source = "recurrent_finish.metal";
  launch.function = "recurrent_finish";
  launch.threads = kernels::kRecurrentThreads;
  launch.threadgroups[0] = static_cast<uint32_t>(p.heads / p.norm_heads);
  launch.threadgroups[1] = static_cast<uint32_t>(p.rows);
  launch.constants[MARLIN_CONSTANT_OUTPUT_TYPE] = ElementTypeOf(operands.out.dtype());
  launch.other_parameters = ParameterBlock(p);
  const TensorView& gates = operands.gates;
  launch.buffers.push_back(
      BoundOr(MARLIN_BUFFER_TAKING, operands.rows.positions, operands.rows.positions));
  launch.buffers.push_back({MARLIN_BUFFER_MIXER_SUMS, sums,
                            int64_t{p.rows} * p.heads * p.columns * int64_t{sizeof(float)}});
  launch.buffers.push_back(BoundOr(MARLIN_BUFFER_MIXER_OUT, operands.out, operands.out));
  launch.buffers.back().written = true;
  launch.buffers.push_back(BoundOr(MARLIN_BUFFER_MIXER_GATES, gates, gates));
  launch.buffers.push_back(BoundOr(MARLIN_BUFFER_MIXER_NORM, operands.norm, gates));
  context->launches.push_back(std::move(launch));
}

Status LaunchAll(ScanOperands operands, const char* function, CallContext* context) {
  MARLIN_ASSIGN_OR_RETURN(operands.scan.places,
                          PlacesOf(operands.rows, operands.states, context->driver));
  if (operands.scan.places.sequences == 0) return Status();
  operands.scan.conv = ParametersOf(operands.conv);
  auto* const mixed = static_cast<float*>(context->workspace);
  const int64_t mixed_bytes = MixedBytes(operands.out.dim(0), operands.conv.channels);
  float* const sums = mixed + mixed_bytes / int64_t{sizeof(float)};
  LaunchMix(operands.conv, operands.scan.places, operands.rows, operands.states, mixed, context);
  MARLIN_RETURN_IF_ERROR(LaunchScan(operands, function, mixed, sums, context));
  LaunchFinish(operands, sums, context);
  return Status();
}

}  // namespace

bool Takes(const GatedDeltaCall& call, const DeviceShape& /*shape*/) {
  return call.sizes.key_dim <= kernels::kMostStateRows &&
         TakesSequences(call.rows, call.states, call.sizes.conv_width);
}

int64_t WorkspaceBytes(const GatedDeltaCall& call, const DeviceShape& /*shape*/) {
  return ScratchBytes(call.out, call.sizes.channels());
}

Status Launch(const GatedDeltaCall& call, CallContext* context) {
  return LaunchAll(OperandsOf(call), ScanKernelOf(call.sizes.key_dim).delta, context);
}

bool Takes(const Mamba2Call& call, const DeviceShape& /*shape*/) {
  return call.sizes.state_size <= kernels::kMostStateRows &&
         TakesSequences(call.rows, call.states, call.sizes.conv_width);
}

int64_t WorkspaceBytes(const Mamba2Call& call, const DeviceShape& /*shape*/) {
  return ScratchBytes(call.out, call.sizes.channels());
}

Status Launch(const Mamba2Call& call, CallContext* context) {
  return LaunchAll(OperandsOf(call), ScanKernelOf(call.sizes.state_size).mamba2, context);
}

}  // namespace marlin::metal
