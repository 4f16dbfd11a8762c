// Between two steps of a recording: feeds the sampled tokens to the next step.
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/decoder/operations.h"
#include "backends/cuda/rows/record_error.cuh"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 128;

/// AdvanceTokensCall.
struct AdvanceArguments {
  const int32_t* sampled = nullptr;
  const int32_t* stop_ids = nullptr;
  int64_t stop_count = 0;
  int32_t* ids = nullptr;
  int32_t* positions = nullptr;
  int32_t* state_rows = nullptr;
  int32_t* counts = nullptr;
  int32_t* tokens = nullptr;
  int64_t rows = 0;
  int64_t steps = 0;
  ErrorView errors;
};

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
    args.state_rows[row] = token;
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

template <>
cudaError_t Load<AdvanceTokensCall>() {
  return PrepareKernels(&AdvanceKernel);
}

Status Run(const AdvanceTokensCall& call, const CallContext& context) {
  const AdvanceArguments args = {call.sampled.As<int32_t>(),
                                 call.stop_ids.As<int32_t>(),
                                 call.stop_ids.dim(0),
                                 call.ids.As<int32_t>(),
                                 call.positions.As<int32_t>(),
                                 call.state_rows.As<int32_t>(),
                                 call.counts.As<int32_t>(),
                                 call.tokens.As<int32_t>(),
                                 call.sampled.dim(0),
                                 call.tokens.dim(1),
                                 context.errors};
  const dim3 grid(static_cast<unsigned>((args.rows + kThreads - 1) / kThreads));
  return context.Launch("advance", &AdvanceKernel, grid, kThreads, args);
}

}  // namespace marlin::cuda
