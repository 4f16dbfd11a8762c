// marlin_batched_gemm_direct_MxN: marlin_gemm_direct_MxN of a batch (gemm_direct.h, batch.h). The
// grid's z is a split of k of a matrix.
#include "backends/metal/kernels/gemm/batch.h"
#include "backends/metal/kernels/gemm/gemm_direct.h"

using namespace metal;
using namespace marlin::kernels;

template <int kRowFragments, int kStrips, int kSimdgroupColumns>
[[kernel]] void marlin_batched_gemm_direct(
    device const uchar* codes [[buffer(MARLIN_BUFFER_CODES)]],
    device const uchar* scales [[buffer(MARLIN_BUFFER_SCALES)]],
    device const uchar* extras [[buffer(MARLIN_BUFFER_EXTRAS)]],
    device const float* table [[buffer(MARLIN_BUFFER_TABLE)]],
    device const uchar* input [[buffer(MARLIN_BUFFER_INPUT)]],
    device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
    device const uchar* bias [[buffer(MARLIN_BUFFER_BIAS)]],
    device const float* row_weight [[buffer(MARLIN_BUFFER_ROW_WEIGHT)]],
    constant BatchParameters& batch [[buffer(MARLIN_BUFFER_PARAMETERS)]],
    uint3 group [[threadgroup_position_in_grid]],
    ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  const uint splits = uint(batch.product.splits);
  const uint matrix = group.z / splits;
  const BatchedMatrix at =
      MatrixAt(matrix, {codes, scales, extras, table}, input, {out, bias, row_weight}, batch);
  const uint3 place = uint3(group.x, group.y, group.z % splits);
  GemmDirect<kRowFragments, kStrips, kSimdgroupColumns>(at.weights, at.input, at.output, place,
                                                        simdgroup, lane, at.product);
}

#define MARLIN_BATCHED_GEMM_DIRECT(name, ...)                                               \
  template [[host_name(name)]] [[kernel]] decltype(marlin_batched_gemm_direct<__VA_ARGS__>) \
      marlin_batched_gemm_direct<__VA_ARGS__>;

MARLIN_BATCHED_GEMM_DIRECT("marlin_batched_gemm_direct_16x64", 2, 2, 4)
MARLIN_BATCHED_GEMM_DIRECT("marlin_batched_gemm_direct_32x64", 4, 2, 4)
MARLIN_BATCHED_GEMM_DIRECT("marlin_batched_gemm_direct_64x64", 4, 4, 2)
