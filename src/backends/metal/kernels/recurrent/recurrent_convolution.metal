// recurrent_mix: SiLU of the causal convolution of rows.
// short_convolution: ShortConvolution without the states after it.
// short_convolution_windows: those states.
//
// A thread per channel of a row, or of a sequence. A row has the same bits however its sequence is
// divided into calls.
#include "backends/metal/kernels/recurrent/recurrent_sequences.h"

using namespace metal;
using namespace marlin::kernels;

/// The convolution of a row that takes part.
static METAL_FUNC float ConvolvedRow(ConvMemory inputs, SequenceMemory memory,
                                     device const float* weights, device const float* bias,
                                     int channel, int row, constant MixParameters& p) {
  const int sequence = SequenceOfRow(memory.first_rows, row, p.places.sequences);
  device const float* const from = StateAt(memory.pages[2 * sequence], p.places);
  return Convolved(ChannelAt(inputs, channel, p.conv), weights + long(channel) * p.conv.conv_width,
                   p.conv.has_bias ? bias[channel] : 0.0f, memory.taking, row,
                   metal::max(memory.first_rows[sequence], 0),
                   from == nullptr ? from : from + channel, p.conv);
}

[[kernel]] void recurrent_mix(device const float* input_0 [[buffer(MARLIN_BUFFER_CONV_INPUT_0)]],
                              device const float* input_1 [[buffer(MARLIN_BUFFER_CONV_INPUT_1)]],
                              device const float* input_2 [[buffer(MARLIN_BUFFER_CONV_INPUT_2)]],
                              device const int* taking [[buffer(MARLIN_BUFFER_TAKING)]],
                              device const int* first_rows [[buffer(MARLIN_BUFFER_SEQUENCE_ROWS)]],
                              device const int* pages [[buffer(MARLIN_BUFFER_STATE_PAGES)]],
                              device float* mixed [[buffer(MARLIN_BUFFER_MIXED)]],
                              device const float* weights [[buffer(MARLIN_BUFFER_CONV_WEIGHTS)]],
                              device const float* bias [[buffer(MARLIN_BUFFER_CONV_BIAS)]],
                              constant MixParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                              uint2 group [[threadgroup_position_in_grid]],
                              ushort index [[thread_index_in_threadgroup]]) {
  const int row = int(group.y);
  const int channel = int(group.x) * kRecurrentThreads + index;
  if (channel >= p.conv.channels || taking[row] < 0) return;
  const ConvMemory inputs = {{input_0, input_1, input_2}};
  const SequenceMemory memory = {taking, first_rows, pages};
  const float sum = ConvolvedRow(inputs, memory, weights, bias, channel, row, p);
  mixed[long(row) * p.conv.channels + channel] = TimesSigmoid(sum, sum);
}

[[kernel]] void short_convolution(
    device const float* values [[buffer(MARLIN_BUFFER_CONV_INPUT_0)]],
    device const float* in_gates [[buffer(MARLIN_BUFFER_CONV_INPUT_1)]],
    device const float* out_gates [[buffer(MARLIN_BUFFER_CONV_INPUT_2)]],
    device const int* taking [[buffer(MARLIN_BUFFER_TAKING)]],
    device const int* first_rows [[buffer(MARLIN_BUFFER_SEQUENCE_ROWS)]],
    device const int* pages [[buffer(MARLIN_BUFFER_STATE_PAGES)]],
    device uchar* out [[buffer(MARLIN_BUFFER_MIXER_OUT)]],
    device const float* weights [[buffer(MARLIN_BUFFER_CONV_WEIGHTS)]],
    device const float* bias [[buffer(MARLIN_BUFFER_CONV_BIAS)]],
    constant MixParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
    uint2 group [[threadgroup_position_in_grid]], ushort index [[thread_index_in_threadgroup]]) {
  const int row = int(group.y);
  const int channel = int(group.x) * kRecurrentThreads + index;
  if (channel >= p.conv.channels) return;
  float result = 0.0f;
  if (taking[row] >= 0) {
    const ConvMemory inputs = {{values, in_gates, nullptr}};
    const SequenceMemory memory = {taking, first_rows, pages};
    const float sum = ConvolvedRow(inputs, memory, weights, bias, channel, row, p);
    result = out_gates[row * p.out_gates + channel] * sum;
  }
  StoreElement(out, output_type, row * p.out.row + channel, result);
}

[[kernel]] void short_convolution_windows(
    device const float* values [[buffer(MARLIN_BUFFER_CONV_INPUT_0)]],
    device const float* in_gates [[buffer(MARLIN_BUFFER_CONV_INPUT_1)]],
    device const int* taking [[buffer(MARLIN_BUFFER_TAKING)]],
    device const int* first_rows [[buffer(MARLIN_BUFFER_SEQUENCE_ROWS)]],
    device const int* pages [[buffer(MARLIN_BUFFER_STATE_PAGES)]],
    device int4* errors [[buffer(MARLIN_BUFFER_SEQUENCE_ERRORS)]],
    constant MixParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
    uint2 group [[threadgroup_position_in_grid]], ushort index [[thread_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  const int sequence = int(group.y);
  const SequenceMemory memory = {taking, first_rows, pages};
  SequenceRows rows;
  if (!FindSequence(memory, sequence, group.x == 0 && index == 0, lane, errors, p.places, &rows)) {
    return;
  }
  const int channel = int(group.x) * kRecurrentThreads + index;
  if (channel >= p.conv.channels) return;
  const ConvMemory inputs = {{values, in_gates, nullptr}};
  StoreWindow(ChannelAt(inputs, channel, p.conv), taking, rows, channel, p.conv);
}
