// Roofline benchmarks: memory bandwidth, and matrix throughput from registers.
#include <metal_stdlib>

#include "backends/metal/kernels/fragments.h"

using namespace metal;
using namespace marlin::kernels;

/// out[thread] = the sum of the words that the thread reads. A threadgroup reads input_stride
/// vectors, in k rounds of kRooflineVectors vectors per thread.
[[kernel]] void marlin_roofline_read(device const uint4* input [[buffer(MARLIN_BUFFER_INPUT)]],
                                     device uint* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                                     constant Parameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                     uint group [[threadgroup_position_in_grid]],
                                     uint thread_of_group [[thread_index_in_threadgroup]],
                                     uint threads [[threads_per_threadgroup]]) {
  device const uint4* next = input + long(group) * p.input_stride + thread_of_group;
  uint4 sum = uint4(0);
  for (int round = 0; round < p.k; ++round) {
    MARLIN_UNROLL
    for (int i = 0; i < kRooflineVectors; ++i) sum += next[uint(i) * threads];
    next += uint(kRooflineVectors) * threads;
  }
  out[group * threads + thread_of_group] = sum.x + sum.y + sum.z + sum.w;
}

/// out[thread] = the sum of a lane's elements of kRooflineSums accumulator fragments after k
/// multiply-accumulates of A and B. Each starts from a different value, so that the compiler cannot
/// merge them. input: the value of all elements of A, of B, kRooflineSums start values.
[[kernel]] void marlin_roofline_multiply(device const float* input [[buffer(MARLIN_BUFFER_INPUT)]],
                                         device float* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                                         constant Parameters& p
                                         [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                         uint thread_of_all [[thread_position_in_grid]]) {
  const simdgroup_float8x8 a = FragmentOf(float2(input[0]));
  const simdgroup_float8x8 b = FragmentOf(float2(input[1]));
  simdgroup_float8x8 sums[kRooflineSums];
  MARLIN_UNROLL
  for (int i = 0; i < kRooflineSums; ++i) sums[i] = FragmentOf(float2(input[2 + i]));
  for (int step = 0; step < p.k; ++step) {
    MARLIN_UNROLL
    for (int i = 0; i < kRooflineSums; ++i) {
      simdgroup_multiply_accumulate(sums[i], a, b, sums[i]);
    }
  }
  float2 all = float2(0.0f);
  MARLIN_UNROLL
  for (int i = 0; i < kRooflineSums; ++i) all += ElementsOf(sums[i]);
  out[thread_of_all] = all.x + all.y;
}
