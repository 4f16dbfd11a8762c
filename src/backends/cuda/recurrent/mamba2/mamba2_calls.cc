// Mamba-2: which kernels run a call, and their arguments.
#include <algorithm>
#include <cstdint>

#include "backends/cuda/plan/tile_problem.h"
#include "backends/cuda/recurrent/mamba2/mamba2_launch.h"
#include "backends/cuda/recurrent/mamba2/mamba2_plan.h"
#include "backends/cuda/recurrent/recurrent_views.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

int64_t SumsBytes(const Mamba2Call& call) {
  return RoundUp(call.out.ElementCount() * int64_t{sizeof(float)}, kBufferAlignment);
}

Mamba2Plan PlanOf(const Mamba2Call& call, const PagedCache& states, const DeviceShape& device) {
  return PlanMamba2(call.sizes, call.out.dim(0), call.rows.pages.dim(0),
                    HasQuads(states, call.sizes.head_dim), call.determinism,
                    device.multiprocessors);
}

Mamba2Arguments ArgumentsOf(const Mamba2Call& call, const CallContext& context) {
  Mamba2Arguments args;
  SetRows(call.rows, call.out, context.errors, &args);
  const Mamba2Weights& weights = call.weights;
  args.gates = HeadsOf(call.inputs.gates);
  args.values = HeadsOf(call.inputs.values);
  args.keys = HeadsOf(call.inputs.keys);
  args.queries = HeadsOf(call.inputs.queries);
  args.steps = HeadsOf(call.inputs.steps);
  args.conv = weights.conv.As<float>();
  args.conv_bias = weights.conv_bias.As<float>();
  args.log_decay = weights.log_decay.As<float>();
  args.step_bias = weights.step_bias.As<float>();
  args.skip = weights.skip.As<float>();
  args.norm = weights.norm.As<float>();
  args.norm_before_gate = weights.norm_before_gate;
  args.epsilon = weights.epsilon;
  args.min_step = weights.min_step;
  args.max_step = weights.max_step;
  args.key_heads = static_cast<int>(call.sizes.groups);
  args.value_heads = static_cast<int>(call.sizes.heads);
  args.key_dim = static_cast<int>(call.sizes.state_size);
  args.value_dim = static_cast<int>(call.sizes.head_dim);
  args.conv_width = static_cast<int>(call.sizes.conv_width);
  return args;
}

/// Runs the sequences with many rows, a turn of chunks at a time.
cudaError_t LaunchChunks(const Mamba2Arguments& args, const Mamba2Plan& plan, float* parts,
                         const CallContext& context) {
  const int shared_bytes = context.shape.shared_bytes;
  cudaError_t error = cudaSuccess;
  for (int64_t first = 0; first < plan.most_chunks && error == cudaSuccess; first += kTurnChunks) {
    const SsdArguments turn = {args, parts, static_cast<int>(first),
                               static_cast<int>(std::min(plan.most_chunks - first, kTurnChunks))};
    error = LaunchSsdLocal(turn, shared_bytes, context.stream);
    if (error == cudaSuccess) error = LaunchSsdScan(turn, shared_bytes, context.stream);
  }
  return error;
}

}  // namespace

template <>
cudaError_t Load<Mamba2Call>() {
  for (const auto load : {LoadMamba2, LoadSsdLocal, LoadSsdScan, LoadMamba2Finish}) {
    const cudaError_t error = load();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

int64_t WorkspaceBytes(const Mamba2Call& call, const DeviceShape& device) {
  const PagedCache states = CacheOf(call.states);
  return SlabTableBytes(states) + SumsBytes(call) + PlanOf(call, states, device).part_bytes;
}

Status Run(const Mamba2Call& call, const CallContext& context) {
  Mamba2Arguments args = ArgumentsOf(call, context);
  if (args.sequences.count == 0) return {};
  MARLIN_RETURN_IF_ERROR(CheckLimits({"mamba2", call.sizes.state_size, call.sizes.head_dim,
                                      call.sizes.conv_width, args.sequences.count}));
  const PagedCache states = CacheOf(call.states);
  const Mamba2Plan plan = PlanOf(call, states, context.shape);
  args.slice_columns = plan.slice_columns;
  if (plan.chunks) args.most_rows = kMostRecurrentRows;
  // The slab table comes first in the workspace, then sums, then the parts of chunks.
  auto* const sums = static_cast<uint8_t*>(context.workspace) + SlabTableBytes(states);
  args.sums = reinterpret_cast<float*>(sums);
  cudaError_t error = PagesOf(states, context, &args.states);
  if (error == cudaSuccess)
    error = LaunchMamba2(args, HasQuads(states, args.value_dim), context.stream);
  if (error == cudaSuccess && plan.chunks) {
    auto* const parts = reinterpret_cast<float*>(sums + SumsBytes(call));
    error = LaunchChunks(args, plan, parts, context);
  }
  if (error == cudaSuccess) error = LaunchMamba2Finish(args, context.stream);
  return context.Check(error, "mamba2");
}

}  // namespace marlin::cuda
