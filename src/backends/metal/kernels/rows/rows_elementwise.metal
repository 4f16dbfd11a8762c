// Operations on the elements of rows, in fp32 and rounded once.
//
//   rows_look_up    out[r] = table[ids[r]]
//   rows_convert    out = x
//   rows_add_to     x += scale * y
//   rows_glu        out = activation(gate) * up, and its clamped form
//   rows_sigmoid    x = sigmoid(x)
//   rows_gate       x = x * sigmoid(gate)
//   rows_cap        x = scale * x, softcap * tanh(x / softcap)
//   rows_scale      x = weight * x, and then the row's weight is 1
//   rows_add        out[t] = sum[t] + rows[slot_of[t]]
//
// A threadgroup has columns of one row. Element sizes apart, every operand is read or written once.
#include "backends/metal/kernels/moe/expert_gate.h"
#include "backends/metal/kernels/rows/rows_elements.h"

using namespace metal;
using namespace marlin::kernels;

[[kernel]] void rows_look_up(device const uchar* table [[buffer(MARLIN_BUFFER_INPUT)]],
                             device const uchar* ids [[buffer(MARLIN_BUFFER_INDICES)]],
                             device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                             device atomic_int* error [[buffer(MARLIN_BUFFER_INDEX_ERROR)]],
                             constant LookUpParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             ushort thread_index [[thread_index_in_threadgroup]],
                             ushort threads [[threads_per_threadgroup]]) {
  const long id = IndexAt(ids, p.ids, long(group.z));
  if (!IsIndex(id, p.ids)) {
    if (group.x == 0 && thread_index == 0) StoreIndexError(ids, p.ids, error);
    return;
  }
  out += p.rows.out.first;
  const long from = id * p.rows.x.outer;
  const long to = RowAt(p.rows.out, group);
  for (int c = FirstColumn(group, thread_index, threads); c < p.rows.columns; c += p.rows.step) {
    CopyElement(table, from + c, out, to + c);
  }
}

[[kernel]] void rows_convert(device const uchar* x [[buffer(MARLIN_BUFFER_INPUT)]],
                             device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                             constant RowParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             ushort thread_index [[thread_index_in_threadgroup]],
                             ushort threads [[threads_per_threadgroup]]) {
  x = MemoryOf(p.x, x, out);
  out += p.out.first;
  const long from = RowAt(p.x, group);
  const long to = RowAt(p.out, group);
  for (int c = FirstColumn(group, thread_index, threads); c < p.columns; c += p.step) {
    CopyElement(x, from + c, out, to + c);
  }
}

[[kernel]] void rows_add_to(device const uchar* y [[buffer(MARLIN_BUFFER_INPUT)]],
                            device uchar* x [[buffer(MARLIN_BUFFER_OUTPUT)]],
                            constant RowParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                            uint3 group [[threadgroup_position_in_grid]],
                            ushort thread_index [[thread_index_in_threadgroup]],
                            ushort threads [[threads_per_threadgroup]]) {
  y = MemoryOf(p.x, y, x);
  x += p.out.first;
  const long from = RowAt(p.x, group);
  const long to = RowAt(p.out, group);
  for (int c = FirstColumn(group, thread_index, threads); c < p.columns; c += p.step) {
    const float sum =
        fma(p.scale, LoadElement(y, input_type, from + c), LoadElement(x, output_type, to + c));
    StoreElement(x, output_type, to + c, sum);
  }
}

[[kernel]] void rows_glu(device const uchar* gate [[buffer(MARLIN_BUFFER_INPUT)]],
                         device const uchar* up [[buffer(MARLIN_BUFFER_ROW_OTHER)]],
                         device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                         constant RowParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         ushort thread_index [[thread_index_in_threadgroup]],
                         ushort threads [[threads_per_threadgroup]]) {
  gate = MemoryOf(p.x, gate, out);
  up = MemoryOf(p.other, up, out);
  out += p.out.first;
  const long from_gate = RowAt(p.x, group);
  const long from_up = RowAt(p.other, group);
  const long to = RowAt(p.out, group);
  for (int c = FirstColumn(group, thread_index, threads); c < p.columns; c += p.step) {
    const float product =
        GateProduct(LoadElement(gate, input_type, from_gate + c),
                    LoadElement(up, extra_type, from_up + c), p.gate_limit, p.gate_alpha);
    StoreElement(out, output_type, to + c, product);
  }
}

[[kernel]] void rows_sigmoid(device float* x [[buffer(MARLIN_BUFFER_OUTPUT)]],
                             constant RowParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             ushort thread_index [[thread_index_in_threadgroup]],
                             ushort threads [[threads_per_threadgroup]]) {
  device float* const row = x + RowAt(p.out, group);
  for (int c = FirstColumn(group, thread_index, threads); c < p.columns; c += p.step) {
    row[c] = TimesSigmoid(1.0f, row[c]);
  }
}

[[kernel]] void rows_gate(device const uchar* gate [[buffer(MARLIN_BUFFER_INPUT)]],
                          device uchar* x [[buffer(MARLIN_BUFFER_OUTPUT)]],
                          constant RowParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                          uint3 group [[threadgroup_position_in_grid]],
                          ushort thread_index [[thread_index_in_threadgroup]],
                          ushort threads [[threads_per_threadgroup]]) {
  device const float* const gates = (device const float*)MemoryOf(p.x, gate, x) + RowAt(p.x, group);
  x += p.out.first;
  const long to = RowAt(p.out, group);
  for (int c = FirstColumn(group, thread_index, threads); c < p.columns; c += p.step) {
    const float value = LoadElement(x, output_type, to + c);
    StoreElement(x, output_type, to + c, TimesSigmoid(value, gates[c]));
  }
}

[[kernel]] void rows_cap(device float* x [[buffer(MARLIN_BUFFER_OUTPUT)]],
                         constant RowParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         ushort thread_index [[thread_index_in_threadgroup]],
                         ushort threads [[threads_per_threadgroup]]) {
  device float* const row = x + RowAt(p.out, group);
  for (int c = FirstColumn(group, thread_index, threads); c < p.columns; c += p.step) {
    const float scaled = p.scale * row[c];
    row[c] = p.softcap == 0.0f ? scaled : p.softcap * precise::tanh(scaled / p.softcap);
  }
}

/// The grid has one threadgroup per row: all of its threads have read the weight before it is 1.
[[kernel]] void rows_scale(device float* weights [[buffer(MARLIN_BUFFER_INDICES)]],
                           device float* x [[buffer(MARLIN_BUFFER_OUTPUT)]],
                           constant RowParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                           uint3 group [[threadgroup_position_in_grid]],
                           ushort thread_index [[thread_index_in_threadgroup]],
                           ushort threads [[threads_per_threadgroup]]) {
  device float* const row = x + RowAt(p.out, group);
  const float weight = weights[group.z];
  for (int c = thread_index; c < p.columns; c += threads) row[c] *= weight;
  threadgroup_barrier(mem_flags::mem_device);
  if (thread_index == 0) weights[group.z] = 1.0f;
}

[[kernel]] void rows_add(device const uchar* sum [[buffer(MARLIN_BUFFER_INPUT)]],
                         device const uchar* rows [[buffer(MARLIN_BUFFER_ROW_OTHER)]],
                         device const int* slot_of [[buffer(MARLIN_BUFFER_INDICES)]],
                         device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                         constant RowParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         ushort thread_index [[thread_index_in_threadgroup]],
                         ushort threads [[threads_per_threadgroup]]) {
  const int slot = p.has_rows ? slot_of[group.z] : -1;
  device const float* const sums = (device const float*)MemoryOf(p.x, sum, out) + RowAt(p.x, group);
  device const float* const added =
      (device const float*)MemoryOf(p.other, rows, out) + long(slot) * p.other.outer;
  out += p.out.first;
  const long to = RowAt(p.out, group);
  for (int c = FirstColumn(group, thread_index, threads); c < p.columns; c += p.step) {
    float value = p.has_sum ? sums[c] : 0.0f;
    // A row alone keeps its bits, the sign of a zero among them.
    if (slot >= 0) value = p.has_sum ? value + added[c] : added[c];
    StoreElement(out, output_type, to + c, value);
  }
}
