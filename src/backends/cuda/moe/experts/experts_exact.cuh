// The exact GEMMs of a layer's experts: every format, layout and type, in fp32 as the exact kernel
// (exact_kernel.cuh), whose sums these are, bit for bit.
//
//   blockIdx.x: n-tile of 32 outputs, blockIdx.y: matrix; a CTA takes all rows of its expert.
#pragma once

#include "backends/cuda/gemm/exact/exact_kernel.cuh"
#include "backends/cuda/gemm/exact/exact_sparse_weights.cuh"
#include "backends/cuda/moe/experts/experts_layout.h"

namespace marlin::cuda {

template <typename Weights, CodeKind kKind>
__global__ void __launch_bounds__(kExactThreads)
    ExpertExactKernel(const __grid_constant__ ExpertExactArguments<typename Weights::View> args) {
  using View = typename Weights::View;
  extern __shared__ float4 shared_memory[];
  __shared__ float table[16];
  __shared__ alignas(16) uint8_t storage[sizeof(ExactArguments<View>)];
  auto& gemm = *reinterpret_cast<ExactArguments<View>*>(storage);
  WaitForEarlierWork();
  TriggerDependentLaunch();
  const int matrix = static_cast<int>(blockIdx.y);
  const int expert = matrix / args.sides;
  const int first_slot = args.slots.begin[expert];
  const int end_slot = args.slots.begin[expert + 1];
  const int out = static_cast<int>(blockIdx.x) * kStripOutputs;
  const ExactExpert<View>& from = args.table[matrix];
  if (first_slot == end_slot || out >= from.weights.n) return;
  if (threadIdx.x == 0) {
    gemm.weights = from.weights;
    gemm.a = args.a;
    gemm.a.m = end_slot;
    gemm.a.k = from.weights.k;
    gemm.epilogue = EpilogueView();
    gemm.epilogue.out = args.out + from.column;
    gemm.epilogue.stride = args.out_stride;
    gemm.epilogue.type = Element::kF32;
    gemm.epilogue.bias = from.bias;
    gemm.epilogue.n = from.weights.n;
    gemm.split = PlanExactParts(from.weights.k);
  }
  if constexpr (LooksUp(kKind)) {
    if (threadIdx.x < 1 << CodeBits(kKind)) table[threadIdx.x] = from.weights.values[threadIdx.x];
  }
  __syncthreads();
  const ExactDecoder decoder = DecoderOf<kKind>(table, from.weights.values);
  auto* const memory = reinterpret_cast<float*>(shared_memory);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  constexpr int kWarps = kMaxExactParts;
  constexpr int kRows = kExpertExactRows;
  float* const sums = memory + kWarps * (kRows * kExactUnit);
  const ExactFinish<Weights, kRows> finish(gemm.epilogue, gemm.a.m, gemm.split.parts, sums);
  ExactPart<Weights, kRows> part(gemm, decoder, memory + warp * (kRows * kExactUnit));
#pragma unroll 1
  for (int row = first_slot; row < end_slot; row += kRows) {
    if (warp < gemm.split.parts) {
      part.Run(warp, out, row, sums + warp * (kRows * kStripOutputs), [] {});
    }
    __syncthreads();
    finish.Run(0, row, out);
    __syncthreads();
  }
}

template <typename Tiles>
const void* ExpertExactKernels::Function(const Variant& variant) {
  if constexpr (Tiles::kSparse) {
    return reinterpret_cast<const void*>(
        &ExpertExactKernel<SparseTileWeights<Tiles::kCodes>, Tiles::kCodes>);
  } else {
    return variant.tiled ? reinterpret_cast<const void*>(
                               &ExpertExactKernel<TileWeights<Tiles::kCodes>, Tiles::kCodes>)
                         : reinterpret_cast<const void*>(
                               &ExpertExactKernel<CanonicalWeights<Tiles::kCodes>, Tiles::kCodes>);
  }
}

}  // namespace marlin::cuda
