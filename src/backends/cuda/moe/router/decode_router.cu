// The router for up to 64 tokens in one launch: product, selection and weights. For code that has
// clusters.
//
//   A cluster has eight tokens, its CTAs a part of k each. A CTA copies the weights of its part
//   before the previous kernel ends, splits its rows, multiplies, and sends each token's sums to
//   the CTA of that token by asynchronous DSMEM stores. CTA i adds the parts of token i in their
//   order and routes it with all of its warps. The arithmetic: split_rows.cuh.
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/moe/router/split_rows.cuh"
#include "backends/cuda/moe/router/token_router.cuh"
#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {
namespace {

constexpr int kWarps = kRouteThreads / 32;
static_assert(kWarps == kRouterN8 && kRouterParts == kRouterN8);

/// A CTA. kBlocks: 16 experts each, of a warp.
template <int kBlocks>
class DecodeBlock {
 public:
  MARLIN_DEVICE DecodeBlock(const RouteRowsArguments& args, uint8_t* memory)
      : args_(args),
        memory_(memory),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) & 31),
        part_(static_cast<int>(blockIdx.x) % kRouterParts),
        first_token_(static_cast<int>(blockIdx.x) / kRouterParts * kRouterN8),
        first_tile_(part_ * args.plan.tiles_of_part),
        tiles_(max(min(args.plan.k_tiles - first_tile_, args.plan.tiles_of_part), 0)) {}

  /// Everything that does not depend on earlier kernels.
  MARLIN_DEVICE void Begin() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < args_.plan.slots; ++i) InitBarrier(Full(i), 1);
      InitBarrier(Arrived(), 1);
      FenceBarrierInit();
      if (HasToken()) ArriveExpecting(Arrived(), kRouterParts * QuadsOfToken() * 16);
      for (int i = 0; i < min(tiles_, args_.plan.slots); ++i) CopyWeights(i);
    }
    ArriveInCluster();
  }

  MARLIN_DEVICE void SplitRows() const {
    constexpr int kAtOnce = 4;  // Loads in flight.
#pragma unroll 1
    for (int first = 0; first < tiles_; first += kAtOnce) {
      float4 quads[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < tiles_) quads[i] = LoadQuad(args_, first_token_, first_tile_ + first + i);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < tiles_) StoreTerms(Fragments(first + i), quads[i]);
      }
    }
    __syncthreads();
  }

  /// The part's sums, to own_sums.
  MARLIN_DEVICE void Multiply() const {
    float sums[kBlocks][4] = {};
#pragma unroll 1
    for (int i = 0; i < tiles_; ++i) {
      const int slot = i % args_.plan.slots;
      Wait(Full(slot), (i / args_.plan.slots) & 1);
      MultiplyTile(Slot(slot), Fragments(i), sums);
      if (i + args_.plan.slots >= tiles_) continue;
      __syncthreads();
      if (threadIdx.x == 0) CopyWeights(i + args_.plan.slots);
    }
    float* const own = Floats(args_.plan.own_sums) + (lane_ & 3) * 2 * args_.plan.sum_stride;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int block = warp_ + b * kWarps;
      if (block >= 2 * args_.plan.strips) continue;
      float* const to = own + block * 16 + (lane_ >> 2);
      to[0] = sums[b][0];
      to[args_.plan.sum_stride] = sums[b][1];
      to[8] = sums[b][2];
      to[args_.plan.sum_stride + 8] = sums[b][3];
    }
    __syncthreads();
  }

  /// Sends the sums of every token to its CTA; a warp has a token.
  MARLIN_DEVICE void Send() const {
    WaitForCluster();
    if (first_token_ + warp_ >= args_.router.tokens) return;
    const float* const from = Floats(args_.plan.own_sums) + warp_ * args_.plan.sum_stride;
    const uint32_t barrier = AddressInBlock(Arrived(), warp_);
    const uint32_t to = AddressInBlock(
        SharedAddress(Floats(args_.plan.part_sums) + part_ * args_.plan.sum_stride), warp_);
    for (int quad = lane_; quad < QuadsOfToken(); quad += 32) {
      StoreToCluster(to + static_cast<uint32_t>(quad) * 16,
                     *reinterpret_cast<const float4*>(from + 4 * quad), barrier);
    }
  }

  MARLIN_DEVICE void Route() const {
    if (!HasToken()) return;
    Wait(Arrived(), 0);
    const float* const parts = Floats(args_.plan.part_sums);
    float* const logits = Floats(args_.plan.logits);
    for (int e = static_cast<int>(threadIdx.x); e < args_.router.experts; e += kRouteThreads) {
      float sum = 0.0f;
#pragma unroll
      for (int part = 0; part < kRouterParts; ++part) {
        sum += parts[part * args_.plan.sum_stride + e];
      }
      logits[e] = args_.bias == nullptr ? sum : sum + args_.bias[e];
    }
    __syncthreads();
    // The ids are read again for the weights: from shared memory.
    auto* const ids = reinterpret_cast<int32_t*>(memory_ + args_.plan.ids);
    RouterArguments selection = args_.router;
    selection.ids = ids;
    selection.ids_stride = 0;
    TokenRouter<kWarps> router(selection, Token(), logits,
                               reinterpret_cast<double*>(memory_ + args_.plan.scores),
                               reinterpret_cast<double*>(memory_ + args_.plan.exchange));
    if (!router.Select()) return;
    if (warp_ == 0) {
      router.Weigh();
    } else {
      int32_t* const to = args_.router.ids + Token() * args_.router.ids_stride;
      for (int i = static_cast<int>(threadIdx.x) - 32; i < selection.top_k;
           i += kRouteThreads - 32) {
        to[i] = ids[i];
      }
    }
  }

 private:
  MARLIN_DEVICE int Token() const { return first_token_ + part_; }
  MARLIN_DEVICE bool HasToken() const { return Token() < args_.router.tokens; }
  MARLIN_DEVICE int QuadsOfToken() const { return (args_.router.experts + 3) / 4; }
  MARLIN_DEVICE float* Floats(int offset) const {
    return reinterpret_cast<float*>(memory_ + offset);
  }
  MARLIN_DEVICE uint32_t* Fragments(int tile) const {
    return reinterpret_cast<uint32_t*>(memory_ + args_.plan.fragments + tile * kFragmentBytes);
  }
  MARLIN_DEVICE uint8_t* Slot(int slot) const {
    const int bytes = args_.plan.strips * kDenseTileBytes;
    return memory_ + args_.plan.total_bytes - (args_.plan.slots - slot) * bytes;
  }
  MARLIN_DEVICE uint32_t Full(int slot) const {
    return SharedAddress(memory_ + args_.plan.barriers) + static_cast<uint32_t>(slot) * 8;
  }
  MARLIN_DEVICE uint32_t Arrived() const { return Full(args_.plan.slots); }

  /// Copies the strips of a k-tile of the part; called by one thread.
  MARLIN_DEVICE void CopyWeights(int tile) const {
    const int slot = tile % args_.plan.slots;
    const uint32_t to = SharedAddress(Slot(slot));
    ArriveExpecting(Full(slot), args_.plan.strips * kDenseTileBytes);
    for (int strip = 0; strip < args_.plan.strips; strip += kStripsOfBlock) {
      const int count = min(args_.plan.strips - strip, kStripsOfBlock);
      CopyBulk(to + static_cast<uint32_t>(strip * kDenseTileBytes),
               args_.weights.tiles + TileOffset(args_.weights, strip, first_tile_ + tile),
               count * kDenseTileBytes, Full(slot));
    }
  }

  MARLIN_DEVICE void MultiplyTile(const uint8_t* weights, const uint32_t* fragments,
                                  float (&sums)[kBlocks][4]) const {
    TermSums terms[kBlocks];
#pragma unroll
    for (int step = 0; step < kStepsOfTile; ++step) {
      uint2 rows[kTerms];
      LoadRows(rows, fragments, step, lane_);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const int block = warp_ + b * kWarps;
        if (block >= 2 * args_.plan.strips) continue;
        uint32_t experts[4];
        LoadWeights(experts, weights + block / 2 * kDenseTileBytes, step, block % 2, lane_);
        terms[b].AddStep(experts, rows);
      }
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) terms[b].AddTo(sums[b]);
  }

  const RouteRowsArguments& args_;
  uint8_t* memory_;
  int warp_;
  int lane_;
  int part_;  ///< Also the CTA's rank in the cluster.
  int first_token_;
  int first_tile_;
  int tiles_;
};

template <int kBlocks>
__global__ void __launch_bounds__(kRouteThreads)
    DecodeRouterKernel(const __grid_constant__ RouteRowsArguments args) {
  if constexpr (kHasTma) {
    extern __shared__ __align__(128) uint8_t memory[];
    const DecodeBlock<kBlocks> block(args, memory);
    block.Begin();
    EnterChain();
    CheckBias(args.router);
    block.SplitRows();
    block.Multiply();
    block.Send();
    block.Route();
  }
}

using Kernel = void (*)(RouteRowsArguments);
constexpr Kernel kKernels[] = {&DecodeRouterKernel<1>, &DecodeRouterKernel<2>,
                               &DecodeRouterKernel<4>};

}  // namespace

cudaError_t LoadDecodeRouter() {
  return PrepareSharedKernels(kKernels[0], kKernels[1], kKernels[2]);
}

cudaError_t LaunchDecodeRouter(const RouteRowsArguments& args, cudaStream_t stream) {
  const int blocks = (2 * args.plan.strips + kWarps - 1) / kWarps;
  const Kernel kernel = kKernels[blocks == 1 ? 0 : blocks == 2 ? 1 : 2];
  const int clusters = (args.router.tokens + kRouterN8 - 1) / kRouterN8;
  RouteRowsArguments copy = args;
  void* pointers[] = {&copy};
  const LaunchSize size = {dim3(static_cast<unsigned>(clusters * kRouterParts)), kRouteThreads,
                           args.plan.total_bytes, true, dim3(kRouterParts)};
  return Launch(reinterpret_cast<const void*>(kernel), size, pointers, stream);
}

}  // namespace marlin::cuda
