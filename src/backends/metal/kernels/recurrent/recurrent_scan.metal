// recurrent_delta_R, recurrent_mamba2_R: the recurrence of up to 32 R rows of a state, a
// threadgroup per 32 columns of a head of a sequence.
#include "backends/metal/kernels/recurrent/recurrent_scan.h"

using namespace metal;
using namespace marlin::kernels;

template <typename Rule, int kRows>
[[kernel]] void marlin_recurrent_scan(
    device const float* input_0 [[buffer(MARLIN_BUFFER_CONV_INPUT_0)]],
    device const float* input_1 [[buffer(MARLIN_BUFFER_CONV_INPUT_1)]],
    device const float* input_2 [[buffer(MARLIN_BUFFER_CONV_INPUT_2)]],
    device const int* taking [[buffer(MARLIN_BUFFER_TAKING)]],
    device const int* first_rows [[buffer(MARLIN_BUFFER_SEQUENCE_ROWS)]],
    device const int* pages [[buffer(MARLIN_BUFFER_STATE_PAGES)]],
    device const float* mixed [[buffer(MARLIN_BUFFER_MIXED)]],
    device float* sums [[buffer(MARLIN_BUFFER_MIXER_SUMS)]],
    device int4* errors [[buffer(MARLIN_BUFFER_SEQUENCE_ERRORS)]],
    device const float* writes [[buffer(MARLIN_BUFFER_MIXER_WRITES)]],
    device const float* decays [[buffer(MARLIN_BUFFER_MIXER_DECAYS)]],
    device const float* log_decays [[buffer(MARLIN_BUFFER_LOG_DECAYS)]],
    device const float* biases [[buffer(MARLIN_BUFFER_DECAY_BIASES)]],
    device const float* skips [[buffer(MARLIN_BUFFER_MIXER_SKIPS)]],
    constant ScanParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
    uint2 group [[threadgroup_position_in_grid]], uint2 groups [[threadgroups_per_grid]],
    ushort index [[thread_index_in_threadgroup]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  const SequenceMemory sequences = {taking, first_rows, pages};
  const ScanMemory memory = {sequences, mixed, sums, writes, decays, log_decays, biases, skips};
  SequenceRows rows;
  const bool reports = group.x == 0 && index == 0;
  if (!FindSequence(sequences, int(group.y), reports, lane, errors, p.places, &rows)) return;
  const int slices = (p.columns + kSliceColumns - 1) / kSliceColumns;
  const int head = int(group.x) / slices;
  const int slice = int(group.x) - head * slices;
  const ScanPlace place = {head, slice * kSliceColumns + simdgroup * kQuadColumns, lane};
  if (place.column < p.columns) ScanRows<Rule, kRows>(memory, rows, place, p);
  const ConvMemory inputs = {{input_0, input_1, input_2}};
  const int threads = int(groups.x) * kRecurrentThreads;
  StoreWindows(inputs, memory, rows, int(group.x) * kRecurrentThreads + index, threads, p);
}

#define MARLIN_RECURRENT_SCAN(name, ...)                                               \
  template [[host_name(name)]] [[kernel]] decltype(marlin_recurrent_scan<__VA_ARGS__>) \
      marlin_recurrent_scan<__VA_ARGS__>;

MARLIN_RECURRENT_SCAN("recurrent_delta_1", DeltaRule<1>, 1)
MARLIN_RECURRENT_SCAN("recurrent_delta_2", DeltaRule<2>, 2)
MARLIN_RECURRENT_SCAN("recurrent_delta_4", DeltaRule<4>, 4)
MARLIN_RECURRENT_SCAN("recurrent_delta_8", DeltaRule<8>, 8)
MARLIN_RECURRENT_SCAN("recurrent_mamba2_1", Mamba2Rule<1>, 1)
MARLIN_RECURRENT_SCAN("recurrent_mamba2_2", Mamba2Rule<2>, 2)
MARLIN_RECURRENT_SCAN("recurrent_mamba2_4", Mamba2Rule<4>, 4)
MARLIN_RECURRENT_SCAN("recurrent_mamba2_8", Mamba2Rule<8>, 8)
