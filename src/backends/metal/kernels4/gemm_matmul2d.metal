// marlin_gemm_matmul2d_T: GEMM with tiles of 64 rows x 64 outputs on the matrix units that Metal 4
// exposes as matmul2d (M5 and later). NOT RUN, neither on a GPU nor in the simulator, which does
// not have tensors: type-checked against `declarations/`, which was written from Apple's
// documentation. No row of kernels.def uses it.
//
//   out[m, n] = epilogue(sum over k of A[m, k] * W[k, n])
//
// Like GemmStaged with one buffer: activations of type T and weights dequantized to fp32 are staged
// in threadgroup memory 32 k at a time, the k granularity of matmul2d; four simdgroups accumulate
// cooperatively into an fp32 cooperative tensor. Threadgroup memory: 16,384 bytes. Error model:
// unknown; weights are rounded to fp32, but the unit's handling of fp32 operands is undocumented.
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

#include <metal_stdlib>
#include <metal_tensor>

#include "backends/metal/kernels/gemm/gemm_staged.h"

using namespace metal;
using namespace marlin::kernels;
using namespace mpp::tensor_ops;

constant constexpr int kScopeSimdgroups = kStagedThreads / kLanes;

template <typename T>
[[kernel]] [[max_total_threads_per_threadgroup(kStagedThreads)]] void marlin_gemm_matmul2d(
    device const uchar* codes [[buffer(MARLIN_BUFFER_CODES)]],
    device const uchar* scales [[buffer(MARLIN_BUFFER_SCALES)]],
    device const uchar* extras [[buffer(MARLIN_BUFFER_EXTRAS)]],
    device const float* table [[buffer(MARLIN_BUFFER_TABLE)]],
    device const uchar* input [[buffer(MARLIN_BUFFER_INPUT)]],
    device uchar* out [[buffer(MARLIN_BUFFER_OUTPUT)]],
    device const uchar* bias [[buffer(MARLIN_BUFFER_BIAS)]],
    device const float* row_weight [[buffer(MARLIN_BUFFER_ROW_WEIGHT)]],
    constant Parameters& p [[buffer(MARLIN_BUFFER_PARAMETERS)]],
    uint2 group [[threadgroup_position_in_grid]],
    ushort thread_index [[thread_index_in_threadgroup]]) {
  using Layout = TileLayout<T>;
  using Extents = dextents<int, 2>;
  threadgroup float4 buffers[StagedQuads<T, 1>::kCount];
  const Operands from = {{codes, scales, extras, table}, {input, nullptr}};
  const TilePlace place = {int(group.y) * kTile, int(group.x) * kTileStrips,
                           (p.n - 1) / kStripOutputs};

  // Extents and strides list the contiguous dimension first.
  tensor<threadgroup T, Extents, tensor_inline> a((threadgroup T*)buffers, Extents(kBlockK, kTile),
                                                  array<int, 2>{1, Layout::kInputStride});
  tensor<threadgroup float, Extents, tensor_inline> weights(
      (threadgroup float*)buffers + Layout::kInputBytes / 4, Extents(kTile, kBlockK),
      array<int, 2>{1, Layout::kWeightStride});
  constexpr auto kDescriptor =
      matmul2d_descriptor(kTile, kTile, kBlockK, /*transpose_left=*/false,
                          /*transpose_right=*/false, /*relaxed_precision=*/false,
                          matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<kDescriptor, execution_simdgroups<kScopeSimdgroups>> multiply;
  auto sums =
      multiply.template get_destination_cooperative_tensor<decltype(a), decltype(weights), float>();
  for (ushort i = 0; i < sums.get_capacity(); ++i) {
    if (sums.is_valid_element(i)) sums[i] = 0.0f;
  }

  Fetched fetched;
  const int steps = p.chunks * kBlocksOfChunk;
  for (int step = 0; step < steps; ++step) {
    Fetch(fetched, from, place, step, thread_index, p);
    Put<T>(buffers, fetched, from, place, step, thread_index, p);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply.run(a, weights, sums);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  threadgroup float* tile = (threadgroup float*)buffers;
  tensor<threadgroup float, Extents, tensor_inline> stored(tile, Extents(kTile, kTile),
                                                           array<int, 2>{1, kTile});
  sums.store(stored);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const Output output = {out, bias, row_weight};
  for (int i = thread_index; i < kTile * kTile; i += kStagedThreads) {
    StoreSum(output, 0, place.row + i / kTile, place.strip * kStripOutputs + i % kTile, tile[i], p);
  }
}

#define MARLIN_GEMM_MATMUL2D(name, type) \
  template [[host_name(                  \
      name)]] [[kernel]] decltype(marlin_gemm_matmul2d<type>) marlin_gemm_matmul2d<type>;

MARLIN_GEMM_MATMUL2D("marlin_gemm_matmul2d_f32", float)
MARLIN_GEMM_MATMUL2D("marlin_gemm_matmul2d_bf16", bfloat)
MARLIN_GEMM_MATMUL2D("marlin_gemm_matmul2d_f16", half)
