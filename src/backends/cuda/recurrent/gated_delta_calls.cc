// The gated delta rule: which kernels run a call, and their arguments.
#include <fmt/core.h>

#include <algorithm>
#include <limits>

#include "backends/cuda/decoder/views.h"
#include "backends/cuda/recurrent/recurrent_launch.h"
#include "backends/cuda/runtime/split_k_scratch.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

/// The states as a cache of pages of one token, for PagesOf.
PagedCache CacheOf(const RecurrentStates& states) {
  PagedCache cache;
  cache.slabs = states.slabs;
  cache.slab_pages = states.slab_pages;
  cache.page_stride = states.page_stride;
  cache.first_element = states.first_element;
  cache.type = DType::kF32;
  cache.page_tokens = 1;
  cache.kv_heads = 1;
  return cache;
}

int64_t SlicesOf(const GatedDeltaSizes& sizes) {
  return CeilDivide(sizes.value_dim, int64_t{kSliceColumns});
}

int64_t SumsBytes(const GatedDeltaCall& call) {
  if (SlicesOf(call.sizes) == 1) return 0;
  return RoundUp(call.out.ElementCount() * int64_t{sizeof(float)}, kBufferAlignment);
}

Status CheckLimits(const GatedDeltaSizes& sizes, int64_t sequences) {
  constexpr int64_t kMostSequences = 65535;
  if (sizes.key_dim > kMostRecurrentKeys || sizes.value_dim > kMostRecurrentValues) {
    return Status(
        Code::kUnsupported,
        fmt::format("gated delta: heads of {} and {} features; supported: up to {} and "
                    "{}",
                    sizes.key_dim, sizes.value_dim, kMostRecurrentKeys, kMostRecurrentValues));
  }
  if (sizes.conv_width > kMostConvWidth) {
    return Status(Code::kUnsupported,
                  fmt::format("gated delta: a convolution of {} tokens; supported: up to {}",
                              sizes.conv_width, kMostConvWidth));
  }
  if (sequences <= kMostSequences) return {};
  return Status(Code::kUnsupported, fmt::format("gated delta: {} sequences; supported: up to {}",
                                                sequences, kMostSequences));
}

HeadsView HeadsOf(const TensorView& view) {
  return {view.As<float>(), view.stride(0), view.stride(1)};
}

/// Whether quads of a state's features can be loaded at once.
bool IsVector(const GatedDeltaCall& call, const PagedCache& cache) {
  constexpr int64_t kQuad = 4;
  return call.sizes.value_dim % kQuad == 0 && cache.page_stride % kQuad == 0 &&
         cache.first_element % kQuad == 0 && SlabsAreAligned(cache);
}

GatedDeltaArguments ArgumentsOf(const GatedDeltaCall& call, const CallContext& context) {
  GatedDeltaArguments args;
  const GatedDeltaInputs& inputs = call.inputs;
  args.queries = HeadsOf(inputs.queries);
  args.keys = HeadsOf(inputs.keys);
  args.values = HeadsOf(inputs.values);
  args.gates = HeadsOf(inputs.gates);
  args.writes = HeadsOf(inputs.writes);
  args.decays = HeadsOf(inputs.decays);
  args.conv = call.weights.conv.As<float>();
  args.log_decay = call.weights.log_decay.As<float>();
  args.decay_bias = call.weights.decay_bias.As<float>();
  args.norm = call.weights.norm.As<float>();
  args.epsilon = call.weights.epsilon;
  args.out = RowsOf(call.out);
  args.sequences = {call.rows.positions.As<int32_t>(),
                    call.rows.first_rows.As<int32_t>(),
                    call.rows.pages.As<int32_t>(),
                    static_cast<int>(call.rows.positions.dim(0)),
                    static_cast<int>(call.rows.first_rows.dim(0)) - 1,
                    2};
  args.key_heads = static_cast<int>(call.sizes.key_heads);
  args.value_heads = static_cast<int>(call.sizes.value_heads);
  args.key_dim = static_cast<int>(call.sizes.key_dim);
  args.value_dim = static_cast<int>(call.sizes.value_dim);
  args.conv_width = static_cast<int>(call.sizes.conv_width);
  args.slices = static_cast<int>(SlicesOf(call.sizes));
  args.errors = context.errors;
  return args;
}

}  // namespace

template <>
cudaError_t Load<GatedDeltaCall>() {
  return LoadRecurrent();
}

int64_t WorkspaceBytes(const GatedDeltaCall& call) {
  // Never nothing: a captured launch's counters belong to its workspace.
  return SlabTableBytes(CacheOf(call.states)) + std::max(SumsBytes(call), kBufferAlignment);
}

Status Run(const GatedDeltaCall& call, const CallContext& context) {
  GatedDeltaArguments args = ArgumentsOf(call, context);
  if (args.sequences.count == 0) return {};
  MARLIN_RETURN_IF_ERROR(CheckLimits(call.sizes, args.sequences.count));
  const PagedCache cache = CacheOf(call.states);
  // The slab table comes first in the workspace.
  args.sums =
      reinterpret_cast<float*>(static_cast<uint8_t*>(context.workspace) + SlabTableBytes(cache));
  const int64_t counters = RoundUp(
      int64_t{args.sequences.count} * args.key_heads * int64_t{sizeof(uint32_t)}, kBufferAlignment);
  const bool counts = args.group() * args.slices > 1;
  const SplitKScratch::Lease scratch =
      counts ? context.scratch.Lend(context.stream, context.workspace, counters)
             : SplitKScratch::Lease();
  args.counters = scratch.words();
  cudaError_t error = PagesOf(cache, context, &args.states);
  if (error == cudaSuccess) error = LaunchRecurrent(args, IsVector(call, cache), context.stream);
  if (error == cudaSuccess && args.slices > 1 && args.sequences.rows > 0) {
    error = LaunchGatedNorm(args, context.stream);
  }
  return context.Check(error, "gated_delta");
}

}  // namespace marlin::cuda
