// marlin_gemm_staged_BxT: B buffers, activations of type T (gemm_staged.h).
#include "backends/metal/kernels/gemm/gemm_staged.h"

using namespace metal;
using namespace marlin::kernels;

template <typename T, int kBuffers>
[[kernel]] [[max_total_threads_per_threadgroup(kStagedThreads)]] void marlin_gemm_staged(
    device const uchar* codes [[buffer(MARLIN_BUFFER_CODES)]],
    device const uchar* scales [[buffer(MARLIN_BUFFER_SCALES)]],
    device const uchar* extras [[buffer(MARLIN_BUFFER_EXTRAS)]],
    device const float* table [[buffer(MARLIN_BUFFER_TABLE)]],
    device const uchar* input [[buffer(MARLIN_BUFFER_INPUT)]],
    device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
    device const uchar* bias [[buffer(MARLIN_BUFFER_BIAS)]],
    device const float* row_weight [[buffer(MARLIN_BUFFER_ROW_WEIGHT)]],
    constant Parameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
    uint group [[threadgroup_position_in_grid]],
    ushort thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 buffers[StagedQuads<T, kBuffers>::kCount];
  const Operands from = {{codes, scales, extras, table}, {input, nullptr}};
  const Output output = {out, bias, row_weight};
  GemmStaged<T, kBuffers>(from, output, buffers, group, thread_index, p);
}

#define MARLIN_GEMM_STAGED(name, ...)                                               \
  template [[host_name(name)]] [[kernel]] decltype(marlin_gemm_staged<__VA_ARGS__>) \
      marlin_gemm_staged<__VA_ARGS__>;

MARLIN_GEMM_STAGED("marlin_gemm_staged_1xf32", float, 1)
MARLIN_GEMM_STAGED("marlin_gemm_staged_1xbf16", bfloat, 1)
MARLIN_GEMM_STAGED("marlin_gemm_staged_1xf16", half, 1)
MARLIN_GEMM_STAGED("marlin_gemm_staged_2xf32", float, 2)
MARLIN_GEMM_STAGED("marlin_gemm_staged_2xbf16", bfloat, 2)
MARLIN_GEMM_STAGED("marlin_gemm_staged_2xf16", half, 2)

/// Clears the partials of work units that continue the previous unit of their threadgroup. One
/// threadgroup per unit.
[[kernel]] void marlin_zero_reduction(device float* partials [[buffer(MARLIN_BUFFER_OUTPUT)]],
                                      constant Parameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                      uint group [[threadgroup_position_in_grid]],
                                      ushort thread_index [[thread_index_in_threadgroup]],
                                      ushort threads [[threads_per_threadgroup]]) {
  const int unit = int(group);
  const int split = unit % p.splits;
  if (split == 0 || unit % p.units_of_group == 0) return;
  const int row_tiles = (p.m + kTile - 1) / kTile;
  const int tile = unit / p.splits;
  for (int i = thread_index; i < kTile * kTile; i += threads) {
    const int row = tile % row_tiles * kTile + i / kTile;
    const int column = tile / row_tiles * kTile + i % kTile;
    if (row < p.m && column < p.n) partials[(long(split) * p.m + row) * p.n + column] = 0.0f;
  }
}
