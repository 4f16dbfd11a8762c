// The router's logits for more than 64 tokens, in memory for the router kernel.
//
//   A CTA has 128 experts x 16 or 32 tokens and all of k. The weights of a k-tile are copied into a
//   ring of stages; all threads load the rows of the next k-tile while
//   this one's terms, in one of two buffers, are multiplied. A warp has 32 experts and half of the
//   tokens. The arithmetic: split_rows.cuh.
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/moe/router/split_rows.cuh"
#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {
namespace {

constexpr int kStageBytes = kStripsOfBlock * kDenseTileBytes;
static_assert(kRouteThreads / 32 == 2 * kStripsOfBlock);

/// The sums of a warp's 16 experts x eight tokens: of the part of k, and of the parts before it.
struct PartSums {
  float part[4] = {};
  float all[4] = {};

  MARLIN_DEVICE void EndPart() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      all[i] += part[i];
      part[i] = 0.0f;
    }
  }
};

/// A CTA.
template <int kN8Tiles, int kStages>
class GemmBlock {
  using Copies = BlockCopies<kRouteThreads>;

 public:
  static constexpr int kOwnN8Tiles = kN8Tiles / 2;

  MARLIN_DEVICE GemmBlock(const RouteRowsArguments& args, uint8_t* memory)
      : args_(args),
        memory_(memory),
        lane_(static_cast<int>(threadIdx.x) & 31),
        strip_(static_cast<int>(threadIdx.x) / 32 % kStripsOfBlock),
        first_n8_(static_cast<int>(threadIdx.x) / 32 / kStripsOfBlock * kOwnN8Tiles),
        first_token_(static_cast<int>(blockIdx.x) * kN8Tiles * kRouterN8),
        first_strip_(static_cast<int>(blockIdx.y) * kStripsOfBlock),
        strips_(min(args.plan.strips - first_strip_, kStripsOfBlock)) {}

  /// Everything that does not depend on earlier kernels.
  MARLIN_DEVICE void Begin() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) InitBarrier(Full(i), Copies::kArrivals);
      FenceBarrierInit();
    }
    if constexpr (Copies::kArrivals > 1) __syncthreads();
    if (!Copies::Calls()) return;
    for (int i = 0; i < min(args_.plan.k_tiles, kStages); ++i) CopyWeights(i);
  }

  MARLIN_DEVICE void Multiply(PartSums (&sums)[2][kOwnN8Tiles]) const {
    float4 quads[kN8Tiles];
    LoadQuads(quads, 0);
    int left = args_.plan.tiles_of_part;
#pragma unroll 1
    for (int tile = 0; tile < args_.plan.k_tiles; ++tile) {
#pragma unroll
      for (int o = 0; o < kN8Tiles; ++o) StoreTerms(Fragments(tile, o), quads[o]);
      if (tile + 1 < args_.plan.k_tiles) LoadQuads(quads, tile + 1);
      // After it, no warp reads the stage and the terms of the tile before.
      __syncthreads();
      const int next = tile - 1 + kStages;
      if (Copies::Calls() && tile > 0 && next < args_.plan.k_tiles) CopyWeights(next);
      Wait(Full(tile % kStages), (tile / kStages) & 1);
      if (strip_ < strips_) MultiplyTile(tile, sums);
      if (--left > 0) continue;
      left = args_.plan.tiles_of_part;
      EndPart(sums);
    }
    EndPart(sums);
  }

  MARLIN_DEVICE void Store(const PartSums (&sums)[2][kOwnN8Tiles]) const {
#pragma unroll
    for (int sixteen = 0; sixteen < 2; ++sixteen) {
#pragma unroll
      for (int o = 0; o < kOwnN8Tiles; ++o) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = first_token_ + (first_n8_ + o) * kRouterN8 + (lane_ & 3) * 2 + i % 2;
          const int expert =
              (first_strip_ + strip_) * kStripOutputs + sixteen * 16 + (lane_ >> 2) + i / 2 * 8;
          if (token >= args_.router.tokens || expert >= args_.router.experts) continue;
          const float sum = sums[sixteen][o].all[i];
          args_.logits[token * args_.router.logits_stride + expert] =
              args_.bias == nullptr ? sum : sum + args_.bias[expert];
        }
      }
    }
  }

 private:
  MARLIN_DEVICE uint32_t* Fragments(int tile, int n8) const {
    const int at = kStages * kStageBytes + (tile % 2 * kN8Tiles + n8) * kFragmentBytes;
    return reinterpret_cast<uint32_t*>(memory_ + at);
  }
  MARLIN_DEVICE uint32_t Full(int stage) const {
    constexpr int kAt = kStages * kStageBytes + 2 * kN8Tiles * kFragmentBytes;
    return SharedAddress(memory_ + kAt) + static_cast<uint32_t>(stage) * 8;
  }

  MARLIN_DEVICE void LoadQuads(float4 (&quads)[kN8Tiles], int tile) const {
#pragma unroll
    for (int o = 0; o < kN8Tiles; ++o) {
      quads[o] = LoadQuad(args_, first_token_ + o * kRouterN8, tile);
    }
  }

  /// Called by the threads that copy.
  MARLIN_DEVICE void CopyWeights(int tile) const {
    const int stage = tile % kStages;
    const int bytes = strips_ * kDenseTileBytes;
    const Copies copies(Full(stage), bytes);
    copies.Copy(SharedAddress(memory_ + stage * kStageBytes),
                args_.weights.tiles + TileOffset(args_.weights, first_strip_, tile), bytes);
    copies.End();
  }

  MARLIN_DEVICE void MultiplyTile(int tile, PartSums (&sums)[2][kOwnN8Tiles]) const {
    const uint8_t* const weights =
        memory_ + tile % kStages * kStageBytes + strip_ * kDenseTileBytes;
    TermSums terms[2][kOwnN8Tiles];
#pragma unroll
    for (int step = 0; step < kStepsOfTile; ++step) {
      uint32_t experts[2][4];
#pragma unroll
      for (int s = 0; s < 2; ++s) LoadWeights(experts[s], weights, step, s, lane_);
#pragma unroll
      for (int o = 0; o < kOwnN8Tiles; ++o) {
        uint2 rows[kTerms];
        LoadRows(rows, Fragments(tile, first_n8_ + o), step, lane_);
#pragma unroll
        for (int s = 0; s < 2; ++s) terms[s][o].AddStep(experts[s], rows);
      }
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int o = 0; o < kOwnN8Tiles; ++o) terms[s][o].AddTo(sums[s][o].part);
    }
  }

  static MARLIN_DEVICE void EndPart(PartSums (&sums)[2][kOwnN8Tiles]) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int o = 0; o < kOwnN8Tiles; ++o) sums[s][o].EndPart();
    }
  }

  const RouteRowsArguments& args_;
  uint8_t* memory_;
  int lane_;
  int strip_;     ///< The warp's, in the CTA's block of 128 experts.
  int first_n8_;  ///< The warp's first, in the CTA's tokens.
  int first_token_;
  int first_strip_;
  int strips_;
};

template <int kN8Tiles, int kStages>
__global__ void __launch_bounds__(kRouteThreads)
    RouterGemmKernel(const __grid_constant__ RouteRowsArguments args) {
  extern __shared__ __align__(128) uint8_t memory[];
  using Block = GemmBlock<kN8Tiles, kStages>;
  const Block block(args, memory);
  block.Begin();
  EnterChain();
  PartSums sums[2][Block::kOwnN8Tiles];
  block.Multiply(sums);
  block.Store(sums);
}

using Plan = RouterGemmPlan;
constexpr auto kNarrow = &RouterGemmKernel<Plan::kFewN8Tiles, Plan::kMostStages>;
constexpr auto kWide = &RouterGemmKernel<Plan::kMostN8Tiles, Plan::kMostStages>;
/// For devices with less shared memory.
constexpr auto kSmall = &RouterGemmKernel<Plan::kFewN8Tiles, Plan::kFewStages>;

}  // namespace

cudaError_t LoadRouterGemm() { return PrepareSharedKernels(kNarrow, kWide, kSmall); }

cudaError_t LaunchRouterGemm(const RouteRowsArguments& args, const DeviceShape& device,
                             cudaStream_t stream) {
  const Plan plan = PlanRouterGemm(args.router.tokens, args.plan, device);
  const auto kernel = plan.stages == Plan::kFewStages      ? kSmall
                      : plan.n8_tiles == Plan::kFewN8Tiles ? kNarrow
                                                           : kWide;
  const int tokens = plan.n8_tiles * kRouterN8;
  const dim3 grid(static_cast<unsigned>((args.router.tokens + tokens - 1) / tokens),
                  static_cast<unsigned>((args.plan.strips + kStripsOfBlock - 1) / kStripsOfBlock));
  return LaunchInChain(kernel, grid, kRouteThreads, RouterGemmBytes(plan), stream, args);
}

cudaError_t LoadRouteRows() {
  for (const auto load : {LoadDecodeRouter, LoadRouterGemv, LoadRouterGemm}) {
    const cudaError_t error = load();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchRouteRows(const RouteRowsArguments& args, const DeviceShape& device,
                            cudaStream_t stream) {
  const bool decodes = args.router.tokens <= kMostDecodeRows;
  if (decodes && args.plan.slots > 0) return LaunchDecodeRouter(args, stream);
  const cudaError_t error =
      decodes ? LaunchRouterGemv(args, stream) : LaunchRouterGemm(args, device, stream);
  return error == cudaSuccess ? LaunchRouter(args.router, device, stream) : error;
}

}  // namespace marlin::cuda
