// GEMMs on weight tiles with mma.sync and cp.async, for code of every capability from 8.0 on.
//
//   One CTA per output tile (and split): 4 or 8 n-tiles of 32 outputs, one for each warp, and
//   kTokens tokens (mma_mainloop.cuh). An item is an output tile; CTAs of adjacent items share
//   weights, and a group of token tiles shares its activations, in L2.
//
//   Bounds per SM and k-iteration of 128, with w warps:
//     memory   w tile_bytes of weights, once for all tokens of a rasterization group
//     L2       the same and kTokens x 256 bytes of activations
//     shared   w x kTokens x 256 bytes that ldmatrix reads, at 128 a cycle: half of the time of the
//              MMAs at 1024 products a cycle, and a quarter at 512
//     MMAs     w x 32 x kTokens x 128 products, at 1024 a cycle (8.0; some 1270 on 9.0) or 512
//     (8.6,
//              8.9, 12.0)
//     issue    an m16n8k16 takes 6 to 16 issue slots of its SM quarter; decoding a fragment takes
//              12 (fp4) to 28 (tables of 16), for kTokens / 8 MMAs: from 64 tokens on less than
//              half
//
//   With few tokens memory bounds it: `stages` x w tiles in flight on every SM, several CTAs on
//   each, and split-K where output tiles are few. With many tokens the MMAs do: the warp tile is 32
//   outputs x 128 tokens, 128 sums a thread, the largest that leaves registers for two sets of
//   fragments; wide in tokens, because decoding is paid per fragment, and weights are cheap to
//   load. Weights are scaled when they are decoded: scaling sums would need a second set of sums,
//   and the order of additions would depend on the width.
//
//   Split-K: every CTA stores its sums, the last one adds them in the order of k
//   (mma_epilogue.cuh).
//
// Error model: a weight is rounded to 16 bits when it is scaled, as in the WGMMA kernel; an MMA
// adds 16 products.
#pragma once

#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/gemm/mma/mma_epilogue.cuh"
#include "backends/cuda/gemm/mma/mma_mainloop.cuh"

namespace marlin::cuda {

/// CTAs of 256 threads per SM that registers allow; of 128 threads twice as many.
constexpr int MmaResidentBlocks(int tokens) { return tokens <= 32 ? 2 : 1; }

/// The CTA's place in the grid, read anew: kept through the mainloop it would take a register
/// there.
MARLIN_DEVICE int BlockOfItem() {
  auto x = static_cast<int>(blockIdx.x);
  asm volatile("" : "+r"(x));
  return x;
}
MARLIN_DEVICE int BlockOfSplit() {
  auto y = static_cast<int>(blockIdx.y);
  asm volatile("" : "+r"(y));
  return y;
}
MARLIN_DEVICE MmaItem ItemOfBlock(const MmaArguments& args) {
  return MmaItemAt(args, BlockOfItem(), BlockOfSplit());
}

/// The n-tile of this warp: after the last one another, whose sums no thread stores.
MARLIN_DEVICE int StripOfWarp(const MmaArguments& args, int block) {
  const int warps = static_cast<int>(blockDim.x) >> 5;
  const int strip = MmaStripOf(args.half_strips, warps, block, static_cast<int>(threadIdx.x) >> 5);
  return min(strip, (args.weights.n + kStripOutputs - 1) / kStripOutputs - 1);
}

template <CodeKind kKind, typename T, int kTokens, ParameterUse kUse,
          template <CodeKind, typename, ParameterUse> typename Strip = StripTile>
__global__ void __launch_bounds__(kMostMmaWarps * 32, MmaResidentBlocks(kTokens))
    MmaKernel(const __grid_constant__ MmaArguments args) {
  extern __shared__ __align__(256) uint8_t memory[];
  EnterChain();
  const MmaItem item = ItemOfBlock(args);
  const TileView& view = args.weights;
  const MmaRun run = {{args.stages, static_cast<int>(blockDim.x) >> 5, view.tile_bytes},
                      SharedAddress(memory),
                      view.tiles + TileOffset(view, StripOfWarp(args, item.block), item.first_tile),
                      int64_t{kStripsOfBlock} * view.tile_bytes,
                      view.groups_per_tile,
                      item.first_tile * kTileK,
                      args.k,
                      item.tiles};
  const PlainRows rows = {args.a, args.a_stride * 2, item.token_tile * kTokens, args.m};
  float acc[kTokens / 8][2][4] = {};
  const MmaMainloop<kKind, T, kTokens, kUse, Strip> mainloop(view);
  mainloop.Run(run, rows, acc);
  __syncthreads();
  const int split = BlockOfSplit();
  if (args.tile_counters != nullptr &&
      !AddSplits<kTokens>(args, BlockOfItem(), split, reinterpret_cast<uint32_t*>(memory), acc)) {
    return;
  }
  const MmaItem done = ItemOfBlock(args);
  const MmaEpilogue<kTokens> epilogue{args, done, split, reinterpret_cast<float*>(memory)};
  epilogue.Run(acc);
}

}  // namespace marlin::cuda
