// The end of a call of Mamba-2: gates and norms of the rows, and the convolution's inputs in
// states, which no kernel reads any more.
#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/recurrent/gated_norm.cuh"
#include "backends/cuda/recurrent/mamba2/mamba2_launch.h"
#include "backends/cuda/recurrent/mamba2/mamba2_rows.cuh"

namespace marlin::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;

/// The sum of a value over a CTA, in every thread.
MARLIN_DEVICE float SumOverBlock(float value) {
  __shared__ float sums[kWarps];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  value = SumOverLanes(value);
  if (lane == 0) sums[threadIdx.x >> 5] = value;
  __syncthreads();
  return SumOverLanes(lane < kWarps ? sums[lane] : 0.0f);
}

/// The heads of a group in a row. Called by a CTA.
MARLIN_DEVICE void FinishRow(const Mamba2Arguments& args, int row, int group) {
  const int features = args.group_features();
  const int first = group * features;
  const bool joins = args.sequences.positions[row] >= 0;
  const float* const sums = args.sums + int64_t{row} * args.value_heads * args.value_dim + first;
  const auto gate_of = [&](int i) {
    const int head = (first + i) / args.value_dim;
    const float gate = args.gates.At(row, head)[first + i - head * args.value_dim];
    return TimesSigmoid(gate, gate);
  };
  const auto store = [&](int i, float value) {
    const int head = (first + i) / args.value_dim;
    StoreFloat(args.out.data, args.out.type,
               args.out.At(row, head) + first + i - head * args.value_dim, value);
  };
  float factor = 1.0f;
  if (joins && args.norm != nullptr) {
    float squares = 0.0f;
    for (int i = static_cast<int>(threadIdx.x); i < features; i += kThreads) {
      const float x = args.norm_before_gate ? sums[i] : sums[i] * gate_of(i);
      squares = __fmaf_rn(x, x, squares);
    }
    const float mean = SumOverBlock(squares) / static_cast<float>(features);
    factor = 1.0f / sqrtf(mean + args.epsilon);
  }
  for (int i = static_cast<int>(threadIdx.x); i < features; i += kThreads) {
    const float norm = args.norm == nullptr ? 1.0f : args.norm[first + i];
    store(i, joins ? sums[i] * gate_of(i) * factor * norm : 0.0f);
  }
}

/// The CTAs of a sequence whose threads have a channel each.
MARLIN_HOST_DEVICE int WindowBlocks(const Mamba2Arguments& args) {
  return static_cast<int>((args.channels() + kThreads - 1) / kThreads);
}

/// blockIdx.x: groups of rows, then channels of sequences.
__global__ void __launch_bounds__(kThreads)
    Mamba2FinishKernel(const __grid_constant__ Mamba2Arguments args) {
  __shared__ int sources[kMostConvWidth];
  EnterChain();
  const auto index = static_cast<int>(blockIdx.x);
  const int of_rows = args.sequences.rows * args.key_heads;
  if (index < of_rows) {
    FinishRow(args, index / args.key_heads, index % args.key_heads);
    return;
  }
  const int blocks = WindowBlocks(args);
  const int sequence = (index - of_rows) / blocks;
  const SequenceState state(args, sequence);
  if (state.to == nullptr) return;
  if (threadIdx.x < 32) FindSourcesBefore(args, state, state.end_row, sources);
  __syncthreads();
  const int channel = (index - of_rows) % blocks * kThreads + static_cast<int>(threadIdx.x);
  if (channel >= args.channels()) return;
  StoreWindow(args, state, MambaChannel(args, channel), sources);
}

}  // namespace

cudaError_t LoadMamba2Finish() { return PrepareKernels(&Mamba2FinishKernel); }

cudaError_t LaunchMamba2Finish(const Mamba2Arguments& args, cudaStream_t stream) {
  const int blocks =
      args.sequences.rows * args.key_heads + args.sequences.count * WindowBlocks(args);
  return LaunchInChain(&Mamba2FinishKernel, dim3(static_cast<unsigned>(blocks)), kThreads, 0,
                       stream, args);
}

}  // namespace marlin::cuda
