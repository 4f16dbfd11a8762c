// The router's logits for up to 64 tokens where no cluster takes them, in memory for the router
// kernel.
//
//   A CTA has 16 experts x eight tokens, a warp a part of k. It loads the weights of the next
//   k-tile from memory, as fragments, while it multiplies. The CTA adds the parts in their order.
//   The arithmetic: split_rows.cuh.
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/moe/router/split_rows.cuh"

namespace marlin::cuda {
namespace {

constexpr int kExperts = 16;
constexpr int kThreads = kRouterParts * 32;
/// Floats between tokens: the lanes of a store fall on different banks.
constexpr int kSumStride = kExperts + 4;

/// A warp.
class PartWarp {
 public:
  MARLIN_DEVICE explicit PartWarp(const RouteRowsArguments& args)
      : args_(args),
        part_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) & 31),
        token_(static_cast<int>(blockIdx.y) * kRouterN8 + (lane_ >> 2)),
        first_tile_(part_ * args.plan.tiles_of_part),
        tiles_(max(min(args.plan.k_tiles - first_tile_, args.plan.tiles_of_part), 0)) {}

  /// The weights of the first k-tile, which do not depend on earlier kernels.
  MARLIN_DEVICE void Begin() {
    if (tiles_ > 0) LoadTile(0);
  }

  MARLIN_DEVICE void Multiply() {
    float2 pairs[kStepsOfTile][2];
    if (tiles_ > 0) LoadPairs(pairs, 0);
#pragma unroll 1
    for (int i = 0; i < tiles_; ++i) {
      TermSums terms;
      uint32_t experts[kStepsOfTile][4];
      uint2 rows[kStepsOfTile][kTerms];
#pragma unroll
      for (int step = 0; step < kStepsOfTile; ++step) {
#pragma unroll
        for (int r = 0; r < 4; ++r) experts[step][r] = weights_[step][r];
        SplitPairs(rows[step], pairs[step][0], pairs[step][1]);
      }
      if (i + 1 < tiles_) {
        LoadTile(i + 1);
        LoadPairs(pairs, i + 1);
      }
#pragma unroll
      for (int step = 0; step < kStepsOfTile; ++step) terms.AddStep(experts[step], rows[step]);
      terms.AddTo(sums_);
    }
  }

  /// `to`: the part's sums, [8 tokens][kSumStride].
  MARLIN_DEVICE void Store(float* to) const {
    float* const at = to + (lane_ & 3) * 2 * kSumStride + (lane_ >> 2);
    at[0] = sums_[0];
    at[kSumStride] = sums_[1];
    at[8] = sums_[2];
    at[kSumStride + 8] = sums_[3];
  }

  MARLIN_DEVICE int part() const { return part_; }

 private:
  MARLIN_DEVICE void LoadTile(int tile) {
    const auto block = static_cast<int>(blockIdx.x);
    const uint8_t* const from =
        args_.weights.tiles + TileOffset(args_.weights, block / 2, first_tile_ + tile);
#pragma unroll
    for (int step = 0; step < kStepsOfTile; ++step) {
      LoadWeights(weights_[step], from, step, block % 2, lane_);
    }
  }
  MARLIN_DEVICE void LoadPairs(float2 (&pairs)[kStepsOfTile][2], int tile) const {
    const int first = (first_tile_ + tile) * kTileK + (lane_ & 3) * 2;
    const float* const row = args_.x + token_ * args_.x_stride;
#pragma unroll
    for (int step = 0; step < kStepsOfTile; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int k = first + step * 16 + half * 8;
        const bool exists = token_ < args_.router.tokens && k < args_.hidden;
        pairs[step][half] = exists ? *reinterpret_cast<const float2*>(row + k) : float2{0.0f, 0.0f};
      }
    }
  }

  const RouteRowsArguments& args_;
  int part_;
  int lane_;
  int token_;  ///< The token of the lane's pairs.
  int first_tile_;
  int tiles_;
  uint32_t weights_[kStepsOfTile][4];
  float sums_[4] = {};
};

/// blockIdx.x: 16 experts; blockIdx.y: eight tokens.
__global__ void __launch_bounds__(kThreads)
    RouterGemvKernel(const __grid_constant__ RouteRowsArguments args) {
  __shared__ float parts[kRouterParts][kRouterN8 * kSumStride];
  PartWarp warp(args);
  warp.Begin();
  EnterChain();
  warp.Multiply();
  warp.Store(parts[warp.part()]);
  __syncthreads();
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread >= kRouterN8 * kExperts) return;
  const int of_block = thread / kExperts;
  const int token = static_cast<int>(blockIdx.y) * kRouterN8 + of_block;
  const int expert = static_cast<int>(blockIdx.x) * kExperts + thread % kExperts;
  if (token >= args.router.tokens || expert >= args.router.experts) return;
  float sum = 0.0f;
#pragma unroll
  for (int part = 0; part < kRouterParts; ++part) {
    sum += parts[part][of_block * kSumStride + thread % kExperts];
  }
  args.logits[token * args.router.logits_stride + expert] =
      args.bias == nullptr ? sum : sum + args.bias[expert];
}

}  // namespace

cudaError_t LoadRouterGemv() { return PrepareKernels(&RouterGemvKernel); }

cudaError_t LaunchRouterGemv(const RouteRowsArguments& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((args.router.experts + kExperts - 1) / kExperts),
                  static_cast<unsigned>((args.router.tokens + kRouterN8 - 1) / kRouterN8));
  return LaunchInChain(&RouterGemvKernel, grid, kThreads, 0, stream, args);
}

}  // namespace marlin::cuda
