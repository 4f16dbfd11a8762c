// marlin_batched_gemv_M: marlin_gemv_M of matrix z of a batch (gemv.h, batch.h).
#include "backends/metal/kernels/gemm/batch.h"
#include "backends/metal/kernels/gemm/gemv.h"

using namespace metal;
using namespace marlin::kernels;

template <int kRows, int kStrips>
[[kernel]] void marlin_batched_gemv(device const uchar* codes [[buffer(MARLIN_BUFFER_CODES)]],
                                    device const uchar* scales [[buffer(MARLIN_BUFFER_SCALES)]],
                                    device const uchar* extras [[buffer(MARLIN_BUFFER_EXTRAS)]],
                                    device const float* table [[buffer(MARLIN_BUFFER_TABLE)]],
                                    device const uchar* input [[buffer(MARLIN_BUFFER_INPUT)]],
                                    device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                                    device const uchar* bias [[buffer(MARLIN_BUFFER_BIAS)]],
                                    device const float* row_weight
                                    [[buffer(MARLIN_BUFFER_ROW_WEIGHT)]],
                                    constant BatchParameters& batch
                                    [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                    uint3 group [[threadgroup_position_in_grid]],
                                    ushort simdgroup [[simdgroup_index_in_threadgroup]],
                                    ushort simdgroups [[simdgroups_per_threadgroup]],
                                    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float sums[GemvSums<kRows, kStrips>::kCount];
  const BatchedMatrix at =
      MatrixAt(group.z, {codes, scales, extras, table}, input, {out, bias, row_weight}, batch);
  const SimdgroupPlace place = {simdgroup, simdgroups, lane};
  Gemv<kRows, kStrips>(at.weights, at.input, at.output, sums, group.xy, place, at.product);
}

#define MARLIN_BATCHED_GEMV(name, ...)                                               \
  template [[host_name(name)]] [[kernel]] decltype(marlin_batched_gemv<__VA_ARGS__>) \
      marlin_batched_gemv<__VA_ARGS__>;

MARLIN_BATCHED_GEMV("marlin_batched_gemv_1", 1, 1)
MARLIN_BATCHED_GEMV("marlin_batched_gemv_2", 2, 1)
MARLIN_BATCHED_GEMV("marlin_batched_gemv_4", 4, 1)
MARLIN_BATCHED_GEMV("marlin_batched_gemv_8", 8, 1)
MARLIN_BATCHED_GEMV("marlin_batched_gemv_16", 16, 1)
MARLIN_BATCHED_GEMV("marlin_batched_gemv_1x2", 1, 2)
MARLIN_BATCHED_GEMV("marlin_batched_gemv_2x2", 2, 2)
MARLIN_BATCHED_GEMV("marlin_batched_gemv_4x2", 4, 2)
