// moe_expert_gemv_M: tiles of M rows, one strip each. moe_expert_gemm_MxN: tiles of M rows and N
// outputs, or N / 2 gated ones (expert_gemm.h).
#include "backends/metal/kernels/moe/expert_gemm.h"

using namespace metal;
using namespace marlin::kernels;

template <int kRows>
[[kernel]] void moe_expert_gemv(device const ExpertMatrix* experts
                                [[buffer(MARLIN_BUFFER_EXPERTS)]],
                                device const int* begin [[buffer(MARLIN_BUFFER_SLOT_BEGIN)]],
                                device const int2* tiles [[buffer(MARLIN_BUFFER_TILES)]],
                                device const int* tokens [[buffer(MARLIN_BUFFER_TOKENS)]],
                                device const uchar* input [[buffer(MARLIN_BUFFER_INPUT)]],
                                device float* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                                constant ExpertParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                uint3 group [[threadgroup_position_in_grid]],
                                ushort simdgroup [[simdgroup_index_in_threadgroup]],
                                ushort simdgroups [[simdgroups_per_threadgroup]],
                                ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float sums[GemvSums<kRows, 1>::kCount];
  const ExpertBuffers buffers = {experts, begin, tiles, tokens, input, out};
  const SimdgroupPlace place = {simdgroup, simdgroups, lane};
  ExpertGemv<kRows>(buffers, sums, group, place, p);
}

#define MOE_EXPERT_GEMV(name, ...) \
  template [[host_name(            \
      name)]] [[kernel]] decltype(moe_expert_gemv<__VA_ARGS__>) moe_expert_gemv<__VA_ARGS__>;

MOE_EXPERT_GEMV("moe_expert_gemv_1", 1)
MOE_EXPERT_GEMV("moe_expert_gemv_2", 2)
MOE_EXPERT_GEMV("moe_expert_gemv_4", 4)
MOE_EXPERT_GEMV("moe_expert_gemv_8", 8)
MOE_EXPERT_GEMV("moe_expert_gemv_16", 16)

template <int kRowFragments, int kStrips, int kSimdgroupColumns>
[[kernel]] void moe_expert_gemm(device const ExpertMatrix* experts
                                [[buffer(MARLIN_BUFFER_EXPERTS)]],
                                device const int* begin [[buffer(MARLIN_BUFFER_SLOT_BEGIN)]],
                                device const int2* tiles [[buffer(MARLIN_BUFFER_TILES)]],
                                device const int* tokens [[buffer(MARLIN_BUFFER_TOKENS)]],
                                device const uchar* input [[buffer(MARLIN_BUFFER_INPUT)]],
                                device float* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                                constant ExpertParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                uint3 group [[threadgroup_position_in_grid]],
                                ushort simdgroup [[simdgroup_index_in_threadgroup]],
                                ushort lane [[thread_index_in_simdgroup]]) {
  const ExpertBuffers buffers = {experts, begin, tiles, tokens, input, out};
  ExpertGemm<kRowFragments, kStrips, kSimdgroupColumns>(buffers, group, simdgroup, lane, p);
}

#define MOE_EXPERT_GEMM(name, ...) \
  template [[host_name(            \
      name)]] [[kernel]] decltype(moe_expert_gemm<__VA_ARGS__>) moe_expert_gemm<__VA_ARGS__>;

MOE_EXPERT_GEMM("moe_expert_gemm_32x64", 4, 2, 4)
MOE_EXPERT_GEMM("moe_expert_gemm_64x64", 4, 4, 2)
