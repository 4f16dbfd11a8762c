// Between two steps of a recording: sampled tokens become those of the next step.
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/decoder/decoder_launch.h"
#include "backends/cuda/rows/record_error.cuh"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 128;

MARLIN_DEVICE bool Stops(const AdvanceArguments& args, int32_t token) {
  bool stops = false;
  for (int64_t i = 0; i < args.stop_count; ++i) stops |= args.stop_ids[i] == token;
  return stops;
}

/// A thread for each row.
__global__ void __launch_bounds__(kThreads)
    AdvanceKernel(const __grid_constant__ AdvanceArguments args) {
  EnterChain();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= args.rows || args.state_rows[row] < 0) return;
  const int32_t token = args.sampled[row];
  const int32_t count = args.counts[row];
  if (count < 0 || count >= args.steps) {
    RecordError(args.errors, ValueError::kCount, count, row, args.steps);
    args.state_rows[row] = -1;
    return;
  }
  if (token < 0) {
    args.state_rows[row] = -1;
    return;
  }
  args.tokens[row * args.steps + count] = token;
  args.counts[row] = count + 1;
  args.positions[row] += 1;
  if (Stops(args, token)) {
    args.state_rows[row] = -1;
  } else {
    args.ids[row] = token;
  }
}

}  // namespace

cudaError_t LoadAdvance() { return PreferShared(reinterpret_cast<const void*>(&AdvanceKernel)); }

cudaError_t LaunchAdvance(const AdvanceArguments& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((args.rows + kThreads - 1) / kThreads));
  return LaunchInChain(&AdvanceKernel, grid, kThreads, 0, stream, args);
}

}  // namespace marlin::cuda
