// Gated short convolutions: the results of all rows, then the states after them.
#include "backends/metal/gemm/strip_layout.h"
#include "backends/metal/recurrent/recurrent_views.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::metal {
namespace {

ConvOperands ConvOf(const ShortConvolutionCall& call) {
  ConvOperands conv{{call.inputs.values, call.inputs.in_gates, {}},
                    call.weights.conv,
                    call.weights.conv_bias,
                    call.sizes.channels,
                    call.sizes.conv_width,
                    true};
  return conv;
}

void LaunchRows(const ShortConvolutionCall& call, const ConvOperands& conv,
                const kernels::MixParameters& p, int64_t columns, CallContext* context) {
  if (p.places.rows == 0) return;
  KernelLaunch launch = SequenceLaunch("recurrent_convolution.metal", "short_convolution",
                                       call.rows, columns, p.places.rows);
  launch.constants[MARLIN_CONSTANT_OUTPUT_TYPE] = ElementTypeOf(call.out.dtype());
  launch.other_parameters = ParameterBlock(p);
  ConvOperands bound = conv;
  bound.inputs[2] = call.inputs.out_gates;
  BindInputs(bound, call.rows, &launch);
  BindWeights(conv, &launch);
  launch.buffers.push_back(BoundOr(MARLIN_BUFFER_MIXER_OUT, call.out, call.out));
  launch.buffers.back().written = true;
  ReachStates(call.states, false, &launch);
  context->launches.push_back(std::move(launch));
}

}  // namespace

bool Takes(const ShortConvolutionCall& call, const DeviceShape& /*shape*/) {
  return TakesSequences(call.rows, call.states, call.sizes.conv_width);
}

Status Launch(const ShortConvolutionCall& call, CallContext* context) {
  const ConvOperands conv = ConvOf(call);
  kernels::MixParameters p{};
  MARLIN_ASSIGN_OR_RETURN(p.places, PlacesOf(call.rows, call.states, context->driver));
  if (p.places.sequences == 0) return Status();
  p.conv = ParametersOf(conv);
  p.out = {call.out.stride(0), 0};
  p.out_gates = call.inputs.out_gates.stride(0);
  const int64_t columns = CeilDivide(conv.channels, kernels::kRecurrentThreads);
  LaunchRows(call, conv, p, columns, context);
  KernelLaunch launch = SequenceLaunch("recurrent_convolution.metal", "short_convolution_windows",
                                       call.rows, columns, p.places.sequences);
  launch.other_parameters = ParameterBlock(p);
  BindInputs(conv, call.rows, &launch);
  MARLIN_RETURN_IF_ERROR(BindSequenceErrors(call.rows, context, &launch));
  ReachStates(call.states, true, &launch);
  context->launches.push_back(std::move(launch));
  return Status();
}

}  // namespace marlin::metal
