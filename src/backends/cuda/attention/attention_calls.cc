// Attention over tensors and over a paged cache: which kernels run a call, and their arguments.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/cuda/attention/attention_launch.h"
#include "backends/cuda/attention/attention_plan.h"
#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/decoder/views.h"
#include "backends/cuda/plan/tile_problem.h"
#include "backends/cuda/runtime/split_k_scratch.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

AttentionShape ShapeOf(const AttentionInput& input) {
  const int64_t kv_heads = input.keys.dim(1);
  return {input.queries.dim(0),
          1,
          kv_heads,
          kv_heads == 0 ? 0 : input.queries.dim(1) / kv_heads,
          input.values.dim(2),
          input.keys.dim(0),
          input.keys.dim(2)};
}

AttentionShape ShapeOf(const PagedAttentionCall& call) {
  const SequenceRows& rows = call.rows;
  return {call.queries.dim(0),
          rows.first_rows.dim(0) - 1,
          call.cache.kv_heads,
          call.queries.dim(1) / call.cache.kv_heads,
          call.cache.value_dim,
          rows.block_tables.dim(1) * call.cache.page_tokens,
          call.cache.key_dim,
          call.cache.type == DType::kF8E4M3,
          call.queries.dtype() == DType::kBf16,
          call.options.allow_bf16_activations};
}

Status CheckLimits(const AttentionShape& shape) {
  constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();
  if (shape.key_dim > kMostKeyFeatures || shape.value_dim > kMostValueFeatures) {
    return Status(
        Code::kUnsupported,
        fmt::format("attention: heads of {} and {} features; supported: up to {} and {}",
                    shape.key_dim, shape.value_dim, kMostKeyFeatures, kMostValueFeatures));
  }
  const int64_t rows = shape.rows * shape.group;
  if (rows <= kMostRows) return {};
  return Status(Code::kUnsupported,
                fmt::format("attention: {} rows of queries; supported: up to {}", rows, kMostRows));
}

/// The arguments that calls on pages and on tensors have in common.
AttentionArguments ArgumentsOf(const AttentionShape& shape, const AttentionPlan& plan,
                               const TensorView& queries, const MutableTensorView& out,
                               const AttentionOptions& options, const CallContext& context) {
  AttentionArguments args;
  args.queries = RowsOf(queries);
  args.out = RowsOf(out);
  args.kv_heads = static_cast<int>(shape.kv_heads);
  args.group = static_cast<int>(shape.group);
  args.key_dim = static_cast<int>(queries.dim(2));
  args.value_dim = static_cast<int>(shape.value_dim);
  args.scale =
      options.scale != 0.0F ? options.scale : 1.0F / std::sqrt(static_cast<float>(queries.dim(2)));
  args.softcap = options.softcap;
  args.window =
      static_cast<int>(std::min<int64_t>(options.window, std::numeric_limits<int32_t>::max()));
  args.chunked = options.chunked;
  args.sinks = options.sinks.As<float>();
  args.one_term = options.allow_bf16_activations;
  args.tile_rows = plan.tile_rows;
  args.tiles = static_cast<int>(plan.tiles);
  args.segments = static_cast<int>(plan.segments);
  args.partials = static_cast<float*>(context.workspace);
  args.errors = context.errors;
  return args;
}

KeysView KeysOf(const TensorView& view) {
  return {view.data(), ElementOf(view.dtype()), view.stride(0), view.stride(1)};
}

/// The kernels that run a call; kLatent: LaunchLatentAttention.
enum class AttentionKernels : uint8_t { kExact, kMatrix, kLatent };

/// See attention_launch.h.
AttentionKernels KernelsOf(const PagedAttentionCall& call) {
  const PagedCache& cache = call.cache;
  const int64_t elements = kCacheAlignment / DTypeBytes(cache.type);
  const bool narrow = cache.type == DType::kBf16 || cache.type == DType::kF8E4M3;
  const bool latent = cache.values_in_keys;
  const auto fits = [](int64_t features, int most) {
    return features > 0 && features % 16 == 0 && features <= most;
  };
  const bool matrix =
      call.options.accuracy == Accuracy::kDefault &&
      call.options.determinism == Determinism::kDefault && narrow &&
      !(latent && call.options.softcap != 0.0F) &&
      fits(cache.key_dim, latent ? kMostLatentKeyFeatures : kMostMatrixFeatures) &&
      fits(cache.value_dim, latent ? kMostLatentValueFeatures : kMostMatrixFeatures) &&
      cache.page_stride % elements == 0 && cache.first_element % elements == 0 &&
      SlabsAreAligned(cache);
  if (!matrix) return AttentionKernels::kExact;
  return latent || TakesWideTiles(ShapeOf(call)) ? AttentionKernels::kLatent
                                                 : AttentionKernels::kMatrix;
}

AttentionPlan PlanOf(const PagedAttentionCall& call, AttentionKernels kernels,
                     const DeviceShape& device) {
  const AttentionShape shape = ShapeOf(call);
  switch (kernels) {
    case AttentionKernels::kExact:
      return PlanAttention(shape, device);
    case AttentionKernels::kMatrix:
      return PlanMatrixAttention(shape, device);
    case AttentionKernels::kLatent:
      return PlanLatentAttention(shape, device);
  }
  return {};
}

cudaError_t LaunchMatrix(const AttentionArguments& args, const DeviceShape& device,
                         cudaStream_t stream) {
  if (args.segments > 0) return LaunchDecodeAttention(args, device, stream);
  return device.has_wgmma ? LaunchPrefillAttention(args, stream)
                          : LaunchMmaAttention(args, device, stream);
}

cudaError_t Launch(const AttentionArguments& args, AttentionKernels kernels,
                   const DeviceShape& device, cudaStream_t stream) {
  switch (kernels) {
    case AttentionKernels::kExact:
      return LaunchAttention(args, device, stream);
    case AttentionKernels::kMatrix:
      return LaunchMatrix(args, device, stream);
    case AttentionKernels::kLatent:
      return LaunchLatentAttention(args, device, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

template <>
cudaError_t Load<AttentionCall>() {
  return LoadAttention();
}

int64_t WorkspaceBytes(const AttentionCall& call, const DeviceShape& device) {
  int64_t bytes = 0;
  for (const AttentionInput& input : call.inputs) {
    bytes = std::max(bytes, PlanAttention(ShapeOf(input), device).partial_bytes);
  }
  return bytes;
}

Status Run(const AttentionCall& call, const CallContext& context) {
  for (const AttentionInput& input : call.inputs) {
    if (input.out.ElementCount() == 0) continue;
    const AttentionShape shape = ShapeOf(input);
    MARLIN_RETURN_IF_ERROR(CheckLimits(shape));
    AttentionArguments args = ArgumentsOf(shape, PlanAttention(shape, context.shape), input.queries,
                                          input.out, call.options, context);
    args.sequences.rows = static_cast<int>(shape.rows);
    args.sequences.count = 1;
    args.keys = KeysOf(input.keys);
    args.values = KeysOf(input.values);
    args.length = static_cast<int>(shape.length);
    MARLIN_RETURN_IF_ERROR(
        context.Check(LaunchAttention(args, context.shape, context.stream), "attention"));
  }
  return {};
}

template <>
cudaError_t Load<PagedAttentionCall>() {
  for (const auto load :
       {LoadDecodeAttention, LoadPrefillAttention, LoadMmaAttention, LoadLatentAttention}) {
    const cudaError_t error = load();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

int64_t WorkspaceBytes(const PagedAttentionCall& call, const DeviceShape& device) {
  return SlabTableBytes(call.cache) + PlanOf(call, KernelsOf(call), device).partial_bytes;
}

Status Run(const PagedAttentionCall& call, const CallContext& context) {
  const AttentionShape shape = ShapeOf(call);
  MARLIN_RETURN_IF_ERROR(CheckLimits(shape));
  const AttentionKernels kernels = KernelsOf(call);
  const AttentionPlan plan = PlanOf(call, kernels, context.shape);
  AttentionArguments args = ArgumentsOf(shape, plan, call.queries, call.out, call.options, context);
  // The slab table comes first in the workspace.
  args.partials = reinterpret_cast<float*>(static_cast<uint8_t*>(context.workspace) +
                                           SlabTableBytes(call.cache));
  args.sequences = SequencesOf(call.rows);
  const int64_t counters =
      RoundUp(plan.tiles * shape.kv_heads * int64_t{sizeof(uint32_t)}, kBufferAlignment);
  const bool counts = kernels == AttentionKernels::kMatrix && plan.segments > 1;
  const SplitKScratch::Lease scratch =
      counts ? context.scratch.Lend(context.stream, context.workspace, counters)
             : SplitKScratch::Lease();
  args.counters = scratch.words();
  cudaError_t error = PagesOf(call.cache, context, &args.pages);
  if (error == cudaSuccess) error = Launch(args, kernels, context.shape, context.stream);
  return context.Check(error, "attention");
}

}  // namespace marlin::cuda
