// recurrent_finish: the norms and gates of a recurrent mixer's sums, a threadgroup per row and its
// heads that are normed together.
#include "backends/metal/kernels/epilogue.h"
#include "backends/metal/kernels/recurrent/recurrent_parameters.h"

using namespace metal;
using namespace marlin::kernels;

static inline float GateAt(device const float* gates, int row, int head, int column,
                           constant MixerFinishParameters& p) {
  const int gate_head = head / p.gate_group;
  const int part = head - gate_head * p.gate_group;
  const float gate =
      gates[row * p.gates.row + gate_head * p.gates.head + part * p.columns + column];
  return TimesSigmoid(gate, gate);
}

[[kernel]] void recurrent_finish(device const int* taking [[buffer(MARLIN_BUFFER_TAKING)]],
                                 device const float* sums [[buffer(MARLIN_BUFFER_MIXER_SUMS)]],
                                 device uchar* out [[buffer(MARLIN_BUFFER_MIXER_OUT)]],
                                 device const float* gates [[buffer(MARLIN_BUFFER_MIXER_GATES)]],
                                 device const float* norm [[buffer(MARLIN_BUFFER_MIXER_NORM)]],
                                 constant MixerFinishParameters& p
                                 [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                 uint2 group [[threadgroup_position_in_grid]],
                                 ushort index [[thread_index_in_threadgroup]],
                                 ushort simdgroup [[simdgroup_index_in_threadgroup]],
                                 ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float squares_of[kRecurrentSimdgroups];
  const int row = int(group.y);
  const int first_head = int(group.x) * p.norm_heads;
  const int features = p.norm_heads * p.columns;
  const bool takes = taking[row] >= 0;
  const bool gates_first = !p.has_norm || !p.norm_before_gate;
  device const float* const row_sums = sums + (long(row) * p.heads + first_head) * p.columns;
  float squares = 0.0f;
  for (int i = index; i < features && takes && p.has_norm; i += kRecurrentThreads) {
    const int head = i / p.columns;
    float value = row_sums[i];
    if (gates_first) value *= GateAt(gates, row, first_head + head, i - head * p.columns, p);
    squares = fma(value, value, squares);
  }
  squares = simd_sum(squares);
  if (lane == 0) squares_of[simdgroup] = squares;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  squares = simd_sum(lane < kRecurrentSimdgroups ? squares_of[lane] : 0.0f);
  const float factor = p.has_norm ? precise::rsqrt(squares / float(features) + p.epsilon) : 1.0f;
  for (int i = index; i < features; i += kRecurrentThreads) {
    const int head = i / p.columns;
    const int column = i - head * p.columns;
    float value = 0.0f;
    if (takes) {
      value = row_sums[i];
      if (gates_first) value *= GateAt(gates, row, first_head + head, column, p);
      if (p.has_norm) {
        value *= factor * norm[p.shares_norm ? column : first_head * p.columns + i];
      }
      if (!gates_first) value *= GateAt(gates, row, first_head + head, column, p);
    }
    StoreElement(out, output_type, row * p.out.row + (first_head + head) * p.out.head + column,
                 value);
  }
}
