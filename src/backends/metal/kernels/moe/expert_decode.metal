// moe_gate_up_1, and moe_expert_gemm_fp4 and moe_shared_expert, the same for fp4 weights and for a
// shared expert of its own kind; moe_shared_score: the gate of the shared expert. moe_down_sum_1
// (expert_decode.h).
#include "backends/metal/kernels/moe/expert_decode.h"

using namespace metal;
using namespace marlin::kernels;

/// kName only tells instances apart.
template <int kStrips, int kName>
[[kernel]] void moe_gate_up(device const ExpertMatrix* experts [[buffer(MARLIN_BUFFER_EXPERTS)]],
                            device int2* error [[buffer(MARLIN_BUFFER_WRONG_ID)]],
                            device const uchar* input [[buffer(MARLIN_BUFFER_INPUT)]],
                            device float* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                            device const int* ids [[buffer(MARLIN_BUFFER_IDS)]],
                            constant ExpertParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                            uint2 group [[threadgroup_position_in_grid]],
                            ushort simdgroup [[simdgroup_index_in_threadgroup]],
                            ushort simdgroups [[simdgroups_per_threadgroup]],
                            ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float sums[GemvSums<1, kStrips>::kCount];
  const ChosenExperts chosen = {experts, ids};
  const SimdgroupPlace place = {simdgroup, simdgroups, lane};
  if (p.reports != 0 && group.x == 0 && group.y == 0 && simdgroup == 0) {
    ReportWrongId(chosen, error, lane, p);
  }
  GateUp<kStrips>(chosen, input, out, sums, group, place, p);
}

#define MOE_GATE_UP(name, ...) \
  template                     \
      [[host_name(name)]] [[kernel]] decltype(moe_gate_up<__VA_ARGS__>) moe_gate_up<__VA_ARGS__>;

MOE_GATE_UP("moe_gate_up_1", 2, 0)
MOE_GATE_UP("moe_expert_gemm_fp4", 2, 1)
MOE_GATE_UP("moe_shared_expert", 2, 2)
MOE_GATE_UP("moe_shared_score", 1, 0)

[[kernel]] void moe_down_sum_1(device const ExpertMatrix* experts [[buffer(MARLIN_BUFFER_EXPERTS)]],
                               device const float* table [[buffer(MARLIN_BUFFER_TABLE)]],
                               device const float* inner [[buffer(MARLIN_BUFFER_INPUT)]],
                               device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                               device const int* ids [[buffer(MARLIN_BUFFER_IDS)]],
                               device const float* weights [[buffer(MARLIN_BUFFER_SLOT_WEIGHTS)]],
                               device const float* scores [[buffer(MARLIN_BUFFER_SCORES)]],
                               constant ExpertParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                               uint2 group [[threadgroup_position_in_grid]],
                               ushort simdgroup [[simdgroup_index_in_threadgroup]],
                               ushort simdgroups [[simdgroups_per_threadgroup]],
                               ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup DownScratch scratch[1];
  const DownBuffers buffers = {{experts, ids}, table, inner, weights, scores, out};
  const SimdgroupPlace place = {simdgroup, simdgroups, lane};
  DownSum(buffers, scratch, group, place, p);
}
