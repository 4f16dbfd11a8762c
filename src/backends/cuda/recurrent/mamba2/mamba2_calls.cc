// Mamba-2: which kernels run a call, and their arguments.
#include <algorithm>

#include "backends/cuda/plan/tile_problem.h"
#include "backends/cuda/recurrent/mamba2/mamba2_launch.h"
#include "backends/cuda/recurrent/recurrent_views.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

int64_t SumsBytes(const Mamba2Call& call) {
  return RoundUp(call.out.ElementCount() * int64_t{sizeof(float)}, kBufferAlignment);
}

/// Fewer value features for a CTA where there are few heads; results do not depend on it.
int SliceColumns(const Mamba2Call& call) {
  const int64_t slices = CeilDivide(call.sizes.head_dim, int64_t{kMambaColumns});
  const int64_t ctas = call.sizes.heads * slices * call.rows.pages.dim(0);
  return 2 * ctas <= DeviceShape().multiprocessors ? kMambaColumns / 2 : kMambaColumns;
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
  args.slice_columns = SliceColumns(call);
  return args;
}

}  // namespace

template <>
cudaError_t Load<Mamba2Call>() {
  const cudaError_t error = LoadMamba2();
  return error == cudaSuccess ? LoadMamba2Finish() : error;
}

int64_t WorkspaceBytes(const Mamba2Call& call) {
  return SlabTableBytes(CacheOf(call.states)) + SumsBytes(call);
}

Status Run(const Mamba2Call& call, const CallContext& context) {
  Mamba2Arguments args = ArgumentsOf(call, context);
  if (args.sequences.count == 0) return {};
  MARLIN_RETURN_IF_ERROR(CheckLimits({"mamba2", call.sizes.state_size, call.sizes.head_dim,
                                      call.sizes.conv_width, args.sequences.count}));
  const PagedCache states = CacheOf(call.states);
  // The slab table comes first in the workspace.
  args.sums =
      reinterpret_cast<float*>(static_cast<uint8_t*>(context.workspace) + SlabTableBytes(states));
  cudaError_t error = PagesOf(states, context, &args.states);
  if (error == cudaSuccess) {
    error = LaunchMamba2(args, HasQuads(states, call.sizes.head_dim), context.stream);
  }
  if (error == cudaSuccess) error = LaunchMamba2Finish(args, context.stream);
  return context.Check(error, "mamba2");
}

}  // namespace marlin::cuda
