// marlin_batched_gemm_staged_BxT: marlin_gemm_staged_BxT of matrix z of a batch (gemm_staged.h,
// batch.h).
#include "backends/metal/kernels/gemm/batch.h"
#include "backends/metal/kernels/gemm/gemm_staged.h"

using namespace metal;
using namespace marlin::kernels;

template <typename T, int kBuffers>
[[kernel]] [[max_total_threads_per_threadgroup(kStagedThreads)]] void marlin_batched_gemm_staged(
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
    ushort thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 buffers[StagedQuads<T, kBuffers>::kCount];
  const BatchedMatrix at =
      MatrixAt(group.z, {codes, scales, extras, table}, input, {out, bias, row_weight}, batch);
  GemmStaged<T, kBuffers>({at.weights, at.input}, at.output, buffers, group.x, thread_index,
                          at.product);
}

#define MARLIN_BATCHED_GEMM_STAGED(name, ...)                                               \
  template [[host_name(name)]] [[kernel]] decltype(marlin_batched_gemm_staged<__VA_ARGS__>) \
      marlin_batched_gemm_staged<__VA_ARGS__>;

MARLIN_BATCHED_GEMM_STAGED("marlin_batched_gemm_staged_1xf32", float, 1)
MARLIN_BATCHED_GEMM_STAGED("marlin_batched_gemm_staged_1xbf16", bfloat, 1)
MARLIN_BATCHED_GEMM_STAGED("marlin_batched_gemm_staged_1xf16", half, 1)
MARLIN_BATCHED_GEMM_STAGED("marlin_batched_gemm_staged_2xf32", float, 2)
MARLIN_BATCHED_GEMM_STAGED("marlin_batched_gemm_staged_2xbf16", bfloat, 2)
MARLIN_BATCHED_GEMM_STAGED("marlin_batched_gemm_staged_2xf16", half, 2)
