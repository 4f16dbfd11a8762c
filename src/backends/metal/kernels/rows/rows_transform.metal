// The columns of activations as weights with an input transform read them, and back.
//
//   rows_move      columns move, or are scaled, or both
//   rows_hadamard  blocks times the Hadamard matrix, and scaled: kMostHadamard columns of a row per
//                  threadgroup, in 16 KiB of its memory. Adds in the order of the host
//                  (layout/input_transform.h), so that both give the same bits.
#include "backends/metal/kernels/rows/rows_elements.h"

using namespace metal;
using namespace marlin::kernels;

[[kernel]] void rows_move(device const uchar* from [[buffer(MARLIN_BUFFER_INPUT)]],
                          device const float* scale [[buffer(MARLIN_BUFFER_TRANSFORM_SCALE)]],
                          device const int* permutation [[buffer(MARLIN_BUFFER_INDICES)]],
                          device uchar* to [[buffer(MARLIN_BUFFER_OUTPUT)]],
                          constant TransformParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                          uint3 group [[threadgroup_position_in_grid]],
                          ushort thread_index [[thread_index_in_threadgroup]],
                          ushort threads [[threads_per_threadgroup]]) {
  const long from_row = long(group.y) * p.from_row;
  const long to_row = long(group.y) * p.to_row;
  for (int c = FirstColumn(group, thread_index, threads); c < p.columns; c += p.step) {
    const int other = p.has_permutation ? permutation[c] : c;
    const long source = from_row + long(p.inverse ? c : other) * p.from_column;
    const long target = to_row + long(p.inverse ? other : c) * p.to_column;
    if (p.has_scale) {
      StoreElement(to, output_type, target, LoadElement(from, input_type, source) * scale[other]);
    } else {
      CopyElement(from, source, to, target);
    }
  }
}

[[kernel]] void rows_hadamard(device const uchar* from [[buffer(MARLIN_BUFFER_INPUT)]],
                              device const float* scale [[buffer(MARLIN_BUFFER_TRANSFORM_SCALE)]],
                              device uchar* to [[buffer(MARLIN_BUFFER_OUTPUT)]],
                              constant TransformParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                              uint3 group [[threadgroup_position_in_grid]],
                              ushort thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float values[kMostHadamard];
  const int first = int(group.x) * kMostHadamard;
  const int count = metal::min(kMostHadamard, p.columns - first);
  const long from_row = long(group.y) * p.from_row;
  const long to_row = long(group.y) * p.to_row;
  for (int i = thread_index; i < count; i += kTransformThreads) {
    const int column = first + i;
    const float value = LoadElement(from, input_type, from_row + long(column) * p.from_column);
    values[i] = p.has_scale && !p.inverse ? value * scale[column] : value;
  }
  for (int half_size = 1; half_size < p.hadamard; half_size *= 2) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int pair = thread_index; pair < count / 2; pair += kTransformThreads) {
      // The first half_size of every 2 * half_size numbers, with the numbers after them.
      const int i = 2 * pair - (pair & (half_size - 1));
      const float a = values[i];
      const float b = values[i + half_size];
      values[i] = a + b;
      values[i + half_size] = a - b;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_index; i < count; i += kTransformThreads) {
    const int column = first + i;
    const float value = values[i] * p.norm;
    StoreElement(to, output_type, to_row + long(column) * p.to_column,
                 p.has_scale && p.inverse ? value * scale[column] : value);
  }
}
