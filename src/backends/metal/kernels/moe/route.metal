// moe_router_topk: expert selection from logits, a threadgroup of one simdgroup per row.
// moe_router_topk_fused: the same from hidden states, a threadgroup of eight simdgroups per row.
//
//   logits[e] = bias[e] + sum over k of x[row, k] * W[k, e]
//
//   simdgroup s has strips s, s + 8, ... of 8 experts; if there are less than 8, 8 / strips
//   simdgroups have every such chunk of a strip each, and their sums are added in order
//
// Each has an instance for more experts, whose threadgroups take twice the memory.
//
// fp32 fma of bf16, f16 or f32 weights. The order of additions depends on the matrix alone, so that
// a row has the same bits whatever the other rows are.
#include "backends/metal/kernels/gemm/gemv.h"
#include "backends/metal/kernels/moe/route.h"

using namespace metal;
using namespace marlin::kernels;

static inline RouterRow RowAt(device int* ids, device float* weights,
                              device const float* choice_bias, device const uint* scales,
                              device atomic_uint* error, uint row, RouterParameters p) {
  const RouterRow made = {
      choice_bias, scales,  ids + long(row) * p.ids_stride, weights + long(row) * p.weights_stride,
      error,       int(row)};
  return made;
}

template <int kExperts>
[[kernel]] void marlin_route(device const float* logits [[buffer(MARLIN_BUFFER_INPUT)]],
                             device const uint* scales [[buffer(MARLIN_BUFFER_ROUTER_SCALES)]],
                             device int* ids [[buffer(MARLIN_BUFFER_ROUTER_IDS)]],
                             device float* weights [[buffer(MARLIN_BUFFER_ROUTER_WEIGHTS)]],
                             device const float* choice_bias [[buffer(MARLIN_BUFFER_CHOICE_BIAS)]],
                             device atomic_uint* error [[buffer(MARLIN_BUFFER_ROUTER_ERROR)]],
                             constant RouterParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
                             uint row [[threadgroup_position_in_grid]],
                             ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float logits_of_row[kExperts];
  threadgroup ulong keys[kExperts];
  threadgroup ulong group_sums[kMostRouterGroups];
  const RouterScratch scratch = {logits_of_row, keys, group_sums};
  device const float* const row_logits = logits + long(row) * p.logits_stride;
  for (int e = lane; e < p.experts; e += kLanes) scratch.logits[e] = row_logits[e];
  RouteRow(scratch, RowAt(ids, weights, choice_bias, scales, error, row, p), lane, p);
}

#define MARLIN_ROUTE(name, ...) \
  template [[host_name(         \
      name)]] [[kernel]] decltype(marlin_route<__VA_ARGS__>) marlin_route<__VA_ARGS__>;

MARLIN_ROUTE("moe_router_topk", kFewRouterExperts)
MARLIN_ROUTE("moe_router_topk_many", kMostRouterExperts)

/// Sums of a row over the chunks first_chunk, first_chunk + step, ... of a strip, for the two
/// experts of a lane.
static METAL_FUNC float2 SumsOfStrip(Strip strip, Input input, int row, int first_chunk, int step,
                                     ushort lane, Parameters p) {
  float2 sum = float2(0.0f);
  for (int chunk = first_chunk; chunk < p.chunks; chunk += step) {
    const ChunkCodes codes = LoadCodes(strip, chunk, lane);
    const GroupPair group = LoadChunkGroup(strip, chunk, lane);
    MARLIN_UNROLL
    for (int s = 0; s < kChunkK / kBlockK; ++s) {
      const BlockWeights w = DecodeBlock(strip, codes, group, chunk, s, lane);
      const int k = chunk * kChunkK + s * kBlockK + 4 * FragmentRow(lane);
      const float4 a = LoadInput(input, row, k, p);
      MARLIN_UNROLL
      for (int j = 0; j < 4; ++j) sum = fma(w.pair[j], float2(a[j]), sum);
    }
  }
  return SumOverRows(sum);
}

/// Not named as on the host, because a public C++ function has that name.
template <int kExperts>
[[kernel]] void marlin_route_fused(
    device const uchar* codes [[buffer(MARLIN_BUFFER_CODES)]],
    device const uchar* x [[buffer(MARLIN_BUFFER_INPUT)]],
    device const uchar* bias [[buffer(MARLIN_BUFFER_BIAS)]],
    device const uint* scales [[buffer(MARLIN_BUFFER_ROUTER_SCALES)]],
    device int* ids [[buffer(MARLIN_BUFFER_ROUTER_IDS)]],
    device float* weights [[buffer(MARLIN_BUFFER_ROUTER_WEIGHTS)]],
    device const float* choice_bias [[buffer(MARLIN_BUFFER_CHOICE_BIAS)]],
    device atomic_uint* error [[buffer(MARLIN_BUFFER_ROUTER_ERROR)]],
    constant RouterParameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
    uint row [[threadgroup_position_in_grid]], ushort simdgroup [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup float logits_of_row[kExperts];
  threadgroup ulong keys[kExperts];
  threadgroup ulong group_sums[kMostRouterGroups];
  const RouterScratch scratch = {logits_of_row, keys, group_sums};
  const int strips = (p.experts + kStripOutputs - 1) / kStripOutputs;
  const int parts = metal::max(kRouterSimdgroups / strips, 1);
  // Unquantized weights have codes only.
  const PackedWeights packed = {codes, codes, codes, nullptr};
  for (int i = simdgroup; i < strips * parts; i += kRouterSimdgroups) {
    const Strip strip = StripAt(i % strips, packed, p.product);
    const float2 sum =
        SumsOfStrip(strip, {x, nullptr}, int(row), i / strips, parts, lane, p.product);
    if ((lane & kRowBits) != 0) continue;
    threadgroup float* const to = scratch.logits + i * kStripOutputs + FragmentColumn(lane);
    to[0] = sum.x;
    to[1] = sum.y;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup != 0) return;
  for (int e = lane; e < p.experts; e += kLanes) {
    float sum = scratch.logits[e];
    for (int part = 1; part < parts; ++part) {
      sum += scratch.logits[part * strips * kStripOutputs + e];
    }
    scratch.logits[e] = has_bias ? sum + LoadElement(bias, bias_type, e) : sum;
  }
  RouteRow(scratch, RowAt(ids, weights, choice_bias, scales, error, row, p), lane, p);
}

#define MARLIN_ROUTE_FUSED(instance, ...)                                               \
  template [[host_name(instance)]] [[kernel]] decltype(marlin_route_fused<__VA_ARGS__>) \
      marlin_route_fused<__VA_ARGS__>;

MARLIN_ROUTE_FUSED("moe_router_topk_fused", kFewRouterExperts)
MARLIN_ROUTE_FUSED("moe_router_topk_fused_many", kMostRouterExperts)
