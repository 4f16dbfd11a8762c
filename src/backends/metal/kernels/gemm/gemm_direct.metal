// marlin_gemm_direct_MxN: tiles of M rows and N outputs (gemm_direct.h).
#include "backends/metal/kernels/gemm/gemm_direct.h"

using namespace metal;
using namespace marlin::kernels;

template <int kRowFragments, int kStrips, int kSimdgroupColumns>
[[kernel]] void marlin_gemm_direct(device const uchar* codes [[buffer(MARLIN_BUFFER_CODES)]],
                                   device const uchar* scales [[buffer(MARLIN_BUFFER_SCALES)]],
                                   device const uchar* extras [[buffer(MARLIN_BUFFER_EXTRAS)]],
                                   device const float* table [[buffer(MARLIN_BUFFER_TABLE)]],
                                   device const uchar* input [[buffer(MARLIN_BUFFER_INPUT)]],
                                   device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                                   device const uchar* bias [[buffer(MARLIN_BUFFER_BIAS)]],
                                   device const float* row_weight
                                   [[buffer(MARLIN_BUFFER_ROW_WEIGHT)]],
                                   constant Parameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                   uint3 group [[threadgroup_position_in_grid]],
                                   ushort simdgroup [[simdgroup_index_in_threadgroup]],
                                   ushort lane [[thread_index_in_simdgroup]]) {
  const PackedWeights weights = {codes, scales, extras, table};
  const Input rows = {input, nullptr};
  const Output output = {out, bias, row_weight};
  GemmDirect<kRowFragments, kStrips, kSimdgroupColumns>(weights, rows, output, group, simdgroup,
                                                        lane, p);
}

#define MARLIN_GEMM_DIRECT(name, ...)                                               \
  template [[host_name(name)]] [[kernel]] decltype(marlin_gemm_direct<__VA_ARGS__>) \
      marlin_gemm_direct<__VA_ARGS__>;

MARLIN_GEMM_DIRECT("marlin_gemm_direct_16x64", 2, 2, 4)
MARLIN_GEMM_DIRECT("marlin_gemm_direct_32x64", 4, 2, 4)
MARLIN_GEMM_DIRECT("marlin_gemm_direct_64x64", 4, 4, 2)
