// MoE routing: top-k expert selection, one warp per token, or one CTA where tokens are few. The
// scores of a token are in shared memory.
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/moe/router/router_launch.h"
#include "backends/cuda/moe/router/router_plan.h"
#include "backends/cuda/moe/router/token_router.cuh"
#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda {
namespace {

constexpr int kMostWarps = 4;  ///< Warps of a CTA that have a token each.
constexpr int kTeamWarps = 8;

/// A warp has a token.
__global__ void __launch_bounds__(kMostWarps * 32)
    RouterKernel(const __grid_constant__ RouterArguments args) {
  extern __shared__ double scores[];
  EnterChain();
  CheckBias(args);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int token = static_cast<int>(blockIdx.x) * static_cast<int>(blockDim.x / 32) + warp;
  if (token >= args.tokens) return;
  TokenRouter<1>(args, token, scores + warp * 2 * args.experts, nullptr).Route();
}

/// A CTA has a token: for few tokens, whose latency counts.
__global__ void __launch_bounds__(kTeamWarps * 32)
    TeamRouterKernel(const __grid_constant__ RouterArguments args) {
  extern __shared__ double scores[];
  EnterChain();
  CheckBias(args);
  TokenRouter<kTeamWarps>(args, static_cast<int>(blockIdx.x), scores, scores + 2 * args.experts)
      .Route();
}

}  // namespace

cudaError_t LoadRouter() { return PrepareSharedKernels(&RouterKernel, &TeamRouterKernel); }

cudaError_t LaunchRouter(const RouterArguments& args, const DeviceShape& device,
                         cudaStream_t stream) {
  const int64_t bytes = args.experts * kScoreBytes;
  if (args.tokens <= device.multiprocessors && args.experts <= kMostTeamExperts) {
    constexpr int kExchange = kTeamWarps * int{sizeof(double)};
    return LaunchInChain(&TeamRouterKernel, dim3(static_cast<unsigned>(args.tokens)),
                         kTeamWarps * 32, static_cast<int>(bytes) + kExchange, stream, args);
  }
  const int64_t fitting = device.shared_bytes / bytes;
  const auto warps = static_cast<int>(fitting < kMostWarps ? fitting : kMostWarps);
  const int blocks = (args.tokens + warps - 1) / warps;
  return LaunchInChain(&RouterKernel, dim3(static_cast<unsigned>(blocks)), warps * 32,
                       static_cast<int>(bytes) * warps, stream, args);
}

}  // namespace marlin::cuda
