// moe_gate_experts and moe_sum_experts (combine_experts.h).
#include "backends/metal/kernels/moe/combine_experts.h"

using namespace metal;
using namespace marlin::kernels;

[[kernel]] void moe_gate_experts(device const ExpertMatrix* experts
                                 [[buffer(MARLIN_BUFFER_EXPERTS)]],
                                 device const int* begin [[buffer(MARLIN_BUFFER_SLOT_BEGIN)]],
                                 device const int2* tiles [[buffer(MARLIN_BUFFER_TILES)]],
                                 device float* both [[buffer(MARLIN_BUFFER_OUTPUT)]],
                                 constant ExpertParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                 uint2 group [[threadgroup_position_in_grid]],
                                 ushort thread_index [[thread_index_in_threadgroup]],
                                 uint2 threads [[threads_per_threadgroup]]) {
  GateExperts(experts, begin, tiles, both, group, thread_index, ushort(threads.x), p);
}

[[kernel]] void moe_sum_experts(device const ExpertMatrix* experts
                                [[buffer(MARLIN_BUFFER_EXPERTS)]],
                                device const int* begin [[buffer(MARLIN_BUFFER_SLOT_BEGIN)]],
                                device const float* results [[buffer(MARLIN_BUFFER_INPUT)]],
                                device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
                                device const int* slot_of [[buffer(MARLIN_BUFFER_SLOT_OF)]],
                                device const float* weights [[buffer(MARLIN_BUFFER_SLOT_WEIGHTS)]],
                                device const float* scores [[buffer(MARLIN_BUFFER_SCORES)]],
                                constant ExpertParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                                uint2 position [[thread_position_in_grid]]) {
  const SumBuffers buffers = {experts, begin, slot_of, weights, scores, results, out};
  SumExperts(buffers, position, p);
}
