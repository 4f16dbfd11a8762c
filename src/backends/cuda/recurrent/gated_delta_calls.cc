// The gated delta rule: which kernels run a call, and their arguments.
#include <algorithm>

#include "backends/cuda/plan/tile_problem.h"
#include "backends/cuda/recurrent/chunked/chunk_launch.h"
#include "backends/cuda/recurrent/chunked/chunk_plan.h"
#include "backends/cuda/recurrent/recurrent_launch.h"
#include "backends/cuda/recurrent/recurrent_views.h"
#include "backends/cuda/runtime/split_k_scratch.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

int64_t SlicesOf(const GatedDeltaSizes& sizes) {
  return CeilDivide(sizes.value_dim, int64_t{kSliceColumns});
}

bool IsAligned(const TensorView& view) {
  return reinterpret_cast<uintptr_t>(view.data()) % 16 == 0;
}
/// Whether LaunchDecode takes a call of as many rows as sequences.
bool Decodes(const GatedDeltaCall& call) {
  const GatedDeltaSizes& sizes = call.sizes;
  const GatedDeltaInputs& inputs = call.inputs;
  const auto has_quads = [](const TensorView& heads) {
    return IsAligned(heads) && heads.stride(0) % 4 == 0 && heads.stride(1) % 4 == 0;
  };
  return call.determinism == Determinism::kDefault && sizes.key_dim == kDecodedFeatures &&
         sizes.value_dim == kDecodedFeatures && sizes.conv_width == kDecodedConvWidth &&
         has_quads(inputs.queries) && has_quads(inputs.keys) && has_quads(inputs.values) &&
         has_quads(inputs.gates) && IsAligned(call.weights.conv) && IsAligned(call.weights.norm);
}

/// How a call runs.
struct DeltaPlan {
  bool vector = false;
  bool decodes = false;  ///< By LaunchDecode.
  bool chunks = false;   ///< Sequences of more than kMostRecurrentRows run in chunks.
  bool norms_apart = false;
  int64_t most_chunks = 0;
  int64_t sums_bytes = 0;
  int64_t part_bytes = 0;
};

DeltaPlan PlanOf(const GatedDeltaCall& call, const PagedCache& states) {
  const GatedDeltaSizes& sizes = call.sizes;
  const int64_t rows = call.out.dim(0);
  const int64_t sequences = call.rows.pages.dim(0);
  DeltaPlan plan;
  plan.vector = HasQuads(states, sizes.value_dim);
  plan.chunks = call.determinism == Determinism::kDefault && plan.vector &&
                (sizes.key_dim == 64 || sizes.key_dim == 128) &&
                sizes.value_dim % kScanColumns == 0 && ChunksPay(rows, sequences);
  plan.decodes = plan.vector && rows <= sequences && Decodes(call);
  plan.norms_apart = plan.chunks || SlicesOf(sizes) > 1;
  if (plan.norms_apart) {
    plan.sums_bytes = RoundUp(call.out.ElementCount() * int64_t{sizeof(float)}, kBufferAlignment);
  }
  if (!plan.chunks) return plan;
  plan.most_chunks = MostChunks(rows, sequences);
  const ChunkLayout layout = {static_cast<int>(sizes.key_heads),
                              static_cast<int>(sizes.value_heads), static_cast<int>(sizes.key_dim),
                              static_cast<int>(sizes.value_dim)};
  plan.part_bytes =
      std::min(plan.most_chunks, kTurnChunks) * layout.ChunkFloats() * int64_t{sizeof(float)};
  return plan;
}

GatedDeltaArguments ArgumentsOf(const GatedDeltaCall& call, const CallContext& context) {
  GatedDeltaArguments args;
  SetRows(call.rows, call.out, context.errors, &args);
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
  args.key_heads = static_cast<int>(call.sizes.key_heads);
  args.value_heads = static_cast<int>(call.sizes.value_heads);
  args.key_dim = static_cast<int>(call.sizes.key_dim);
  args.value_dim = static_cast<int>(call.sizes.value_dim);
  args.conv_width = static_cast<int>(call.sizes.conv_width);
  args.slices = static_cast<int>(SlicesOf(call.sizes));
  return args;
}

/// Runs the sequences with many rows, a turn of chunks at a time.
cudaError_t LaunchChunks(const GatedDeltaArguments& args, const DeltaPlan& plan, float* parts,
                         const CallContext& context) {
  cudaStream_t const stream = context.stream;
  cudaError_t error = cudaSuccess;
  for (int64_t first = 0; first < plan.most_chunks && error == cudaSuccess; first += kTurnChunks) {
    const ChunkArguments turn = {args, parts, static_cast<int>(first),
                                 static_cast<int>(std::min(plan.most_chunks - first, kTurnChunks))};
    error = LaunchChunkLocal(turn, stream);
    if (error == cudaSuccess) error = LaunchChunkScan(turn, context.shape.shared_bytes, stream);
  }
  return error == cudaSuccess ? LaunchWindows(args, stream) : error;
}

cudaError_t Launch(const GatedDeltaArguments& args, const DeltaPlan& plan, float* parts,
                   const CallContext& context) {
  cudaStream_t const stream = context.stream;
  // Counters are not lent where memory is short.
  if (plan.decodes && args.counts_readers()) return LaunchDecode(args, stream);
  cudaError_t error = LaunchRecurrent(args, plan.vector, stream);
  if (error == cudaSuccess && plan.chunks) error = LaunchChunks(args, plan, parts, context);
  const bool norms = plan.norms_apart && args.sequences.rows > 0;
  return error == cudaSuccess && norms ? LaunchGatedNorm(args, stream) : error;
}

}  // namespace

template <>
cudaError_t Load<GatedDeltaCall>() {
  for (const auto load : {LoadRecurrent, LoadDecode, LoadChunkLocal, LoadChunkScan}) {
    const cudaError_t error = load();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

int64_t WorkspaceBytes(const GatedDeltaCall& call, const DeviceShape& /*device*/) {
  const PagedCache states = CacheOf(call.states);
  const DeltaPlan plan = PlanOf(call, states);
  // Never nothing: a captured launch's counters belong to its workspace.
  return SlabTableBytes(states) +
         std::max<int64_t>(plan.sums_bytes + plan.part_bytes, kBufferAlignment);
}

Status Run(const GatedDeltaCall& call, const CallContext& context) {
  GatedDeltaArguments args = ArgumentsOf(call, context);
  if (args.sequences.count == 0) return {};
  MARLIN_RETURN_IF_ERROR(CheckLimits({"gated delta", call.sizes.key_dim, call.sizes.value_dim,
                                      call.sizes.conv_width, args.sequences.count}));
  const PagedCache states = CacheOf(call.states);
  const DeltaPlan plan = PlanOf(call, states);
  // The slab table comes first in the workspace, then sums, then the parts of chunks.
  auto* const sums = static_cast<uint8_t*>(context.workspace) + SlabTableBytes(states);
  args.sums = reinterpret_cast<float*>(sums);
  args.norms_apart = plan.norms_apart;
  if (plan.chunks) args.most_rows = kMostRecurrentRows;
  const int64_t counters = RoundUp(
      int64_t{args.sequences.count} * args.key_heads * int64_t{sizeof(uint32_t)}, kBufferAlignment);
  const bool counts = args.readers() > 1;
  const SplitKScratch::Lease scratch =
      counts ? context.scratch.Lend(context.stream, context.workspace, counters)
             : SplitKScratch::Lease();
  args.counters = scratch.words();
  cudaError_t error = PagesOf(states, context, &args.states);
  if (error == cudaSuccess) {
    error = Launch(args, plan, reinterpret_cast<float*>(sums + plan.sums_bytes), context);
  }
  return context.Check(error, "gated_delta");
}

}  // namespace marlin::cuda
