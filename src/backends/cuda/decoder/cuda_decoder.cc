#include "backends/cuda/decoder/cuda_decoder.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "backends/cuda/attention/attention_plan.h"
#include "backends/cuda/attention/latent/expand_latents.h"
#include "backends/cuda/attention/latent/head_product.h"
#include "backends/cuda/attention/latent/latent_attention.h"
#include "backends/cuda/attention/latent/latent_attention_plan.h"
#include "backends/cuda/common/cuda_gemm.h"
#include "backends/cuda/decoder/decoder_launch.h"
#include "backends/cuda/moe/router/router_launch.h"
#include "backends/cuda/moe/router/router_plan.h"
#include "backends/cuda/moe/router/router_product.h"
#include "backends/cuda/persistent/persistent_step.h"
#include "backends/cuda/weights/prepared_tiles.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"
#include "plan/step/decoder_calls.h"

namespace marlin::cuda {
namespace {

constexpr int64_t kMostIndex = std::numeric_limits<int32_t>::max();

cudaStream_t StreamOf(const OperationContext& context) {
  return static_cast<cudaStream_t>(context.stream);
}

/// The rows of a view; kernels write only those of outputs.
RowsView RowsOf(const TensorView& view) {
  RowsView rows;
  rows.data = const_cast<void*>(view.data());
  rows.type = ElementOf(view.dtype());
  rows.stride = view.stride(0);
  rows.rows = view.dim(0);
  if (view.rank() == 3) {
    rows.inner = static_cast<int>(view.dim(1));
    rows.inner_stride = view.stride(1);
    rows.rows *= rows.inner;
  }
  return rows;
}

IndexView IndicesOf(const TensorView& view) { return {view.data(), view.dtype() == DType::kI64}; }

/// Slabs that do not fit in the kernel's parameters lie in the workspace.
int64_t SlabTableBytes(const PagedCache& cache) {
  const auto count = static_cast<int64_t>(cache.slabs.size());
  if (count <= kMostSlabParameters) return 0;
  return RoundUp(count * int64_t{sizeof(void*)}, kBufferAlignment);
}

/// `table`: SlabTableBytes of device memory. The copy reads the host's table before it returns.
cudaError_t PagesOf(const PagedCache& cache, void* table, cudaStream_t stream, PagesView* pages) {
  pages->slab_count = static_cast<int>(cache.slabs.size());
  pages->slab_pages = static_cast<uint32_t>(
      std::min<int64_t>(cache.slab_pages, std::numeric_limits<uint32_t>::max()));
  pages->page_stride = cache.page_stride;
  pages->first_element = cache.first_element;
  pages->type = ElementOf(cache.type);
  pages->page_tokens = static_cast<int>(cache.page_tokens);
  pages->kv_heads = static_cast<int>(cache.kv_heads);
  pages->key_dim = static_cast<int>(cache.key_dim);
  pages->value_dim = static_cast<int>(cache.value_dim);
  pages->values_in_keys = cache.values_in_keys;
  if (SlabTableBytes(cache) == 0) {
    std::copy(cache.slabs.begin(), cache.slabs.end(), pages->slabs);
    return cudaSuccess;
  }
  pages->more_slabs = static_cast<void* const*>(table);
  // A graph would read the host's table again, when it is gone.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (stream != nullptr) cudaStreamIsCapturing(stream, &capture);
  if (capture != cudaStreamCaptureStatusNone) return cudaErrorStreamCaptureUnsupported;
  return cudaMemcpyAsync(table, cache.slabs.data(), cache.slabs.size_bytes(),
                         cudaMemcpyHostToDevice, stream);
}

SequencesView SequencesOf(const SequenceRows& rows) {
  SequencesView view;
  view.positions = rows.positions.As<int32_t>();
  view.first_rows = rows.first_rows.As<int32_t>();
  view.block_tables = rows.block_tables.As<int32_t>();
  view.rows = static_cast<int>(rows.positions.dim(0));
  view.count = static_cast<int>(rows.first_rows.dim(0)) - 1;
  view.blocks = static_cast<int>(rows.block_tables.dim(1));
  return view;
}

AttentionShape ShapeOf(const AttentionInput& input) {
  const int64_t kv_heads = input.keys.dim(1);
  return {input.queries.dim(0),
          1,
          kv_heads,
          kv_heads == 0 ? 0 : input.queries.dim(1) / kv_heads,
          input.values.dim(2),
          input.keys.dim(0)};
}

AttentionShape ShapeOf(const PagedAttentionCall& call) {
  const SequenceRows& rows = call.rows;
  return {call.queries.dim(0),  rows.first_rows.dim(0) - 1,
          call.cache.kv_heads,  call.queries.dim(1) / call.cache.kv_heads,
          call.cache.value_dim, rows.block_tables.dim(1) * call.cache.page_tokens};
}

int Multiprocessors() { return DeviceShape().multiprocessors; }

Status CheckFeatures(int64_t key_dim, int64_t value_dim, int64_t rows) {
  if (key_dim > kMostKeyFeatures || value_dim > kMostValueFeatures) {
    return Status(Code::kUnsupported,
                  fmt::format("attention: heads of {} and {} features; supported: up to {} and {}",
                              key_dim, value_dim, kMostKeyFeatures, kMostValueFeatures));
  }
  if (rows <= kMostIndex) return {};
  return Status(
      Code::kUnsupported,
      fmt::format("attention: {} rows of queries; supported: up to {}", rows, kMostIndex));
}

/// The arguments that calls on pages and on tensors have in common.
AttentionArguments ArgumentsOf(const AttentionShape& shape, const AttentionPlan& plan,
                               const TensorView& queries, const MutableTensorView& out,
                               const AttentionOptions& options, void* partials) {
  AttentionArguments args;
  args.queries = RowsOf(queries);
  args.out = RowsOf(out);
  args.kv_heads = static_cast<int>(shape.kv_heads);
  args.group = static_cast<int>(shape.group);
  args.key_dim = static_cast<int>(queries.dim(2));
  args.value_dim = static_cast<int>(shape.value_dim);
  args.scale =
      options.scale != 0.0F ? options.scale : 1.0F / std::sqrt(static_cast<float>(queries.dim(2)));
  args.window = static_cast<int>(std::min<int64_t>(options.window, kMostIndex));
  args.sinks = options.sinks.As<float>();
  args.tile_rows = plan.tile_rows;
  args.tiles = static_cast<int>(plan.tiles);
  args.segments = static_cast<int>(plan.segments);
  args.partials = static_cast<float*>(partials);
  return args;
}

constexpr int64_t kCacheAlignment = 16;
bool SlabsAreAligned(const PagedCache& cache) {
  return std::ranges::all_of(cache.slabs, [](const void* slab) {
    return reinterpret_cast<uintptr_t>(slab) % kCacheAlignment == 0;
  });
}

KeysView KeysOf(const TensorView& view) {
  return {view.data(), ElementOf(view.dtype()), view.stride(0), view.stride(1)};
}

SamplingView SamplingOf(const SamplingOptions& options) {
  return {options.temperature,
          options.top_p,
          options.min_p,
          options.repetition_penalty,
          options.presence_penalty,
          options.frequency_penalty,
          options.top_k,
          options.seed};
}

}  // namespace

template <typename Launch>
Status CudaDecoder::Enqueue(const char* kernel, const Launch& launch) const {
  MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
  const DeviceScope scope(device_->index);
  return device_->errors.Check(launch(), kernel);
}

Status CudaDecoder::Load() const {
  return Enqueue("decoder", [] {
    for (const auto load : {LoadRouter, LoadRouteRows, LoadAttention, LoadDecodeAttention,
                            LoadPrefillAttention, LoadLatentAttention, LoadExpandLatents,
                            LoadRowKernels, LoadRmsNorm, LoadRotateAppend, LoadAdvance}) {
      const cudaError_t error = load();
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}

bool CudaDecoder::Has(DecoderOperation operation) const {
  switch (operation) {
    case DecoderOperation::kLookUpRows:
    case DecoderOperation::kLookUpWeightRows:
    case DecoderOperation::kConvert:
    case DecoderOperation::kRmsNorm:
    case DecoderOperation::kAddTo:
    case DecoderOperation::kAddRmsNorm:
    case DecoderOperation::kApplyRotary:
    case DecoderOperation::kApplyGate:
    case DecoderOperation::kApplySigmoid:
    case DecoderOperation::kHeadProduct:
    case DecoderOperation::kExpandLatents:
    case DecoderOperation::kAttention:
    case DecoderOperation::kAppendToCache:
    case DecoderOperation::kRotateAndAppend:
    case DecoderOperation::kPagedAttention:
    case DecoderOperation::kRouteTokens:
    case DecoderOperation::kResetSampler:
    case DecoderOperation::kSampleTokens:
    case DecoderOperation::kAdvanceTokens:
      return true;
    default:
      return false;
  }
}

int64_t CudaDecoder::cache_page_tokens() const { return kCachePageTokens; }

int64_t CudaDecoder::sampler_state_bytes(int64_t vocab) const {
  return RoundUp(int64_t{sizeof(SamplerState)} + vocab * int64_t{sizeof(uint32_t)},
                 kBufferAlignment);
}

Result<FusedRun> CudaDecoder::Fuse(const StepDescription& step,
                                   std::span<const StepOperation> operations) const {
  if (!persistent_) return FusedRun();
  return FusePersistent(device_, errors_, shape_, step, operations);
}

Status CudaDecoder::Run(const LookUpRowsCall& call, const OperationContext& context) const {
  CopyRowsArguments args;
  args.from = RowsOf(call.table);
  args.out = RowsOf(call.out);
  args.ids = IndicesOf(call.ids);
  args.columns = call.out.dim(1);
  args.errors = errors_.view();
  return Enqueue("lookup", [&] { return LaunchCopyRows(args, StreamOf(context)); });
}

Status CudaDecoder::Run(const LookUpWeightRowsCall& call, const OperationContext& context) const {
  const auto& weights = static_cast<const PreparedTiles&>(call.table);
  LookUpWeightsArguments args;
  args.ids = IndicesOf(call.ids);
  args.out = RowsOf(call.out);
  args.columns = call.out.dim(1);
  args.outputs = call.table.spec.n;
  args.errors = errors_.view();
  cudaStream_t const stream = StreamOf(context);
  return Enqueue("lookup", [&] {
    if (weights.traits.marlin_w4) return LaunchLookUpMarlinW4(weights.MarlinW4(0), args, stream);
    if (!weights.traits.tiled) return LaunchLookUpCanonical(weights.Canonical(0), args, stream);
    if (weights.traits.sparse) {
      return LaunchLookUpSparse(weights.Tiles(0), weights.kind(), args, stream);
    }
    return LaunchLookUpTiles(weights.Tiles(0), weights.kind(), args, stream);
  });
}

Status CudaDecoder::Run(const ConvertCall& call, const OperationContext& context) const {
  CopyRowsArguments args;
  args.from = RowsOf(call.x);
  args.out = RowsOf(call.out);
  args.columns = call.x.dim(call.x.rank() - 1);
  return Enqueue("convert", [&] { return LaunchCopyRows(args, StreamOf(context)); });
}

Status CudaDecoder::Run(const RmsNormCall& call, const OperationContext& context) const {
  RmsNormArguments args;
  args.x = RowsOf(call.x);
  args.out = RowsOf(call.out);
  args.weight = call.weight.data();
  args.weight_type = ElementOf(call.weight.dtype());
  args.columns = static_cast<int>(call.weight.dim(0));
  args.epsilon = call.epsilon;
  return Enqueue("norm", [&] { return LaunchRmsNorm(args, StreamOf(context)); });
}

Status CudaDecoder::Run(const AddToCall& call, const OperationContext& context) const {
  const AddToArguments args{RowsOf(call.y), RowsOf(call.x), call.x.dim(1), call.scale};
  return Enqueue("residual", [&] { return LaunchAddTo(args, StreamOf(context)); });
}

Status CudaDecoder::Run(const AddRmsNormCall& call, const OperationContext& context) const {
  RmsNormArguments args;
  args.x = RowsOf(call.residual);
  args.block = RowsOf(call.block);
  args.out = RowsOf(call.out);
  args.weight = call.weight.data();
  args.weight_type = ElementOf(call.weight.dtype());
  args.columns = static_cast<int>(call.weight.dim(0));
  args.epsilon = call.epsilon;
  return Enqueue("norm", [&] { return LaunchRmsNorm(args, StreamOf(context)); });
}

Status CudaDecoder::Run(const ApplyRotaryCall& call, const OperationContext& context) const {
  RotaryArguments args;
  args.x = RowsOf(call.x);
  args.positions = IndicesOf(call.positions);
  args.frequencies = call.rotary.inverse_frequencies.As<float>();
  args.pairs = static_cast<int>(call.rotary.inverse_frequencies.dim(0));
  args.factor = call.rotary.attention_factor;
  args.interleaved = call.rotary.interleaved;
  args.errors = errors_.view();
  return Enqueue("rope", [&] { return LaunchRotary(args, StreamOf(context)); });
}

Status CudaDecoder::Run(const ApplyGateCall& call, const OperationContext& context) const {
  ApplyGateArguments args;
  args.gate = RowsOf(call.gate);
  args.up = RowsOf(call.up);
  args.out = RowsOf(call.out);
  args.columns = call.out.dim(1);
  args.options = {static_cast<int>(call.options.activation), call.options.limit,
                  call.options.alpha};
  return Enqueue("glu", [&] { return LaunchApplyGate(args, StreamOf(context)); });
}

Status CudaDecoder::Run(const ApplySigmoidCall& call, const OperationContext& context) const {
  return Enqueue("sigmoid",
                 [&] { return LaunchSigmoid(RowsOf(call.x), call.x.dim(1), StreamOf(context)); });
}

int64_t CudaDecoder::WorkspaceBytes(const AppendToCacheCall& call) const {
  return SlabTableBytes(call.cache);
}

Status CudaDecoder::Run(const AppendToCacheCall& call, const OperationContext& context) const {
  AppendArguments args;
  args.keys = RowsOf(call.keys);
  if (!call.cache.values_in_keys) args.values = RowsOf(call.values);
  args.sequences = SequencesOf(call.rows);
  args.errors = errors_.view();
  return Enqueue("append_to_cache", [&] {
    const cudaError_t error =
        PagesOf(call.cache, context.workspace, StreamOf(context), &args.pages);
    return error == cudaSuccess ? LaunchAppend(args, StreamOf(context)) : error;
  });
}

int64_t CudaDecoder::WorkspaceBytes(const RotateAndAppendCall& call) const {
  return SlabTableBytes(call.cache);
}

Status CudaDecoder::Run(const RotateAndAppendCall& call, const OperationContext& context) const {
  if (call.cache.key_dim > kMostRotateFeatures) return RunUnfused(call, context);
  RotateAppendArguments args;
  args.queries = RowsOf(call.heads.queries);
  args.keys = RowsOf(call.heads.keys);
  args.values = RowsOf(call.heads.values);
  args.heads = static_cast<int>(call.heads.queries.dim(1));
  args.query_norm = call.norms.queries.data();
  args.query_norm_type = ElementOf(call.norms.queries.dtype());
  args.key_norm = call.norms.keys.data();
  args.key_norm_type = ElementOf(call.norms.keys.dtype());
  args.epsilon = call.norms.epsilon;
  args.frequencies = call.rotary.inverse_frequencies.As<float>();
  args.pairs = static_cast<int>(call.rotary.inverse_frequencies.dim(0));
  args.factor = call.rotary.attention_factor;
  args.interleaved = call.rotary.interleaved;
  args.sequences = SequencesOf(call.rows);
  args.slabs_are_aligned = SlabsAreAligned(call.cache);
  args.errors = errors_.view();
  return Enqueue("rotate_append", [&] {
    const cudaError_t error =
        PagesOf(call.cache, context.workspace, StreamOf(context), &args.pages);
    return error == cudaSuccess ? LaunchRotateAppend(args, StreamOf(context)) : error;
  });
}

/// For heads of more features than the fused kernel holds.
Status CudaDecoder::RunUnfused(const RotateAndAppendCall& call,
                               const OperationContext& context) const {
  const auto prepare = [&](const MutableTensorView& x, const TensorView& norm) -> Status {
    if (!norm.empty()) {
      MARLIN_RETURN_IF_ERROR(Run(RmsNormCall{x, norm, call.norms.epsilon, x}, context));
    }
    return Run(ApplyRotaryCall{call.rotary, call.rows.positions, x}, context);
  };
  MARLIN_RETURN_IF_ERROR(prepare(call.heads.queries, call.norms.queries));
  MARLIN_RETURN_IF_ERROR(prepare(call.heads.keys, call.norms.keys));
  return Run(AppendToCacheCall{call.heads.keys, call.heads.values, call.rows, call.cache}, context);
}

namespace {

/// Whether matrix units run a product: see LaunchMatrixHeadProduct.
bool UsesMatrixUnits(const HeadProductCall& call) {
  const auto aligned = [](const TensorView& view) {
    const int64_t elements = 16 / DTypeBytes(view.dtype());
    return reinterpret_cast<uintptr_t>(view.data()) % 16 == 0 && view.stride(0) % elements == 0 &&
           view.stride(1) % elements == 0;
  };
  const int64_t inputs = call.x.dim(2);
  return call.options.accuracy == Accuracy::kDefault &&
         call.options.determinism == Determinism::kDefault && call.x.dtype() == DType::kF32 &&
         call.weights.dtype() == DType::kBf16 && inputs > 0 && inputs % kHeadProductInputs == 0 &&
         aligned(call.x) && aligned(call.weights);
}

}  // namespace

Status CudaDecoder::Run(const HeadProductCall& call, const OperationContext& context) const {
  HeadProductArguments args;
  args.x = RowsOf(call.x);
  args.weights = RowsOf(call.weights);
  args.out = RowsOf(call.out);
  args.tokens = call.x.dim(0);
  args.heads = static_cast<int>(call.x.dim(1));
  args.inputs = static_cast<int>(call.x.dim(2));
  args.outputs = static_cast<int>(call.weights.dim(1));
  const bool matrix = UsesMatrixUnits(call);
  return Enqueue("head_product", [&] {
    return matrix ? LaunchMatrixHeadProduct(args, StreamOf(context))
                  : LaunchHeadProduct(args, StreamOf(context));
  });
}

namespace {

/// Whether matrix units expand latents: see LaunchMatrixExpandLatents.
bool UsesMatrixUnits(const ExpandLatentsCall& call) {
  const PagedCache& latents = call.latents;
  const int64_t elements = kCacheAlignment / DTypeBytes(latents.type);
  const auto panels = [](int64_t features) {
    return features > 0 && features % kExpandFeatures == 0;
  };
  const auto aligned = [](const TensorView& weights) {
    return weights.dtype() == DType::kBf16 && weights.stride(0) % 8 == 0 &&
           weights.stride(1) % 8 == 0 &&
           reinterpret_cast<uintptr_t>(weights.data()) % kCacheAlignment == 0;
  };
  const bool narrow = latents.type == DType::kBf16 || latents.type == DType::kF8E4M3;
  return narrow && call.heads.type == DType::kBf16 && panels(latents.value_dim) &&
         panels(call.key_weights.dim(2)) && panels(call.heads.value_dim) &&
         latents.key_dim % elements == 0 && latents.page_stride % elements == 0 &&
         latents.first_element % elements == 0 && SlabsAreAligned(latents) &&
         call.heads.page_stride % 8 == 0 && call.heads.first_element % 8 == 0 &&
         call.heads.key_dim % 8 == 0 && SlabsAreAligned(call.heads) && aligned(call.key_weights) &&
         aligned(call.value_weights);
}

}  // namespace

int64_t CudaDecoder::WorkspaceBytes(const ExpandLatentsCall& call) const {
  return SlabTableBytes(call.latents);
}

Status CudaDecoder::Run(const ExpandLatentsCall& call, const OperationContext& context) const {
  const PagedCache& heads = call.heads;
  ExpandLatentsArguments args;
  args.sequences.block_tables = call.pages.As<int32_t>();
  args.sequences.count = 1;
  args.sequences.blocks = static_cast<int>(call.pages.dim(0));
  args.tokens = call.tokens.As<int32_t>();
  args.key_weights = RowsOf(call.key_weights);
  args.value_weights = RowsOf(call.value_weights);
  args.nope = static_cast<int>(call.key_weights.dim(2));
  args.heads = static_cast<int>(heads.kv_heads);
  args.key_dim = static_cast<int>(heads.key_dim);
  args.value_dim = static_cast<int>(heads.value_dim);
  args.out_type = ElementOf(heads.type);
  args.out = static_cast<uint8_t*>(heads.slabs[0]) + heads.first_element * DTypeBytes(heads.type);
  args.page_stride = heads.page_stride;
  args.errors = errors_.view();
  const bool matrix = UsesMatrixUnits(call);
  cudaStream_t const stream = StreamOf(context);
  return Enqueue("expand_latents", [&] {
    const cudaError_t error = PagesOf(call.latents, context.workspace, stream, &args.latents);
    if (error != cudaSuccess) return error;
    return matrix ? LaunchMatrixExpandLatents(args, stream) : LaunchExpandLatents(args, stream);
  });
}

int64_t CudaDecoder::WorkspaceBytes(const AttentionCall& call) const {
  int64_t bytes = 0;
  for (const AttentionInput& input : call.inputs) {
    bytes = std::max(bytes, PlanAttention(ShapeOf(input), Multiprocessors()).partial_bytes);
  }
  return bytes;
}

Status CudaDecoder::Run(const AttentionCall& call, const OperationContext& context) const {
  for (const AttentionInput& input : call.inputs) {
    if (input.out.ElementCount() == 0) continue;
    const AttentionShape shape = ShapeOf(input);
    MARLIN_RETURN_IF_ERROR(
        CheckFeatures(input.keys.dim(2), shape.value_dim, shape.rows * shape.group));
    const AttentionPlan plan = PlanAttention(shape, Multiprocessors());
    AttentionArguments args =
        ArgumentsOf(shape, plan, input.queries, input.out, call.options, context.workspace);
    args.sequences.rows = static_cast<int>(shape.rows);
    args.sequences.count = 1;
    args.keys = KeysOf(input.keys);
    args.values = KeysOf(input.values);
    args.length = static_cast<int>(shape.length);
    args.errors = errors_.view();
    MARLIN_RETURN_IF_ERROR(
        Enqueue("attention", [&] { return LaunchAttention(args, StreamOf(context)); }));
  }
  return {};
}

namespace {

/// The kernels that run a call.
enum class AttentionKernels : uint8_t { kExact, kMatrix, kLatent };

/// Whether matrix units run a call: see LaunchDecodeAttention, or LaunchLatentAttention for a cache
/// with values in its keys.
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
      fits(cache.key_dim, latent ? kMostLatentKeyFeatures : kMostMatrixFeatures) &&
      fits(cache.value_dim, latent ? kMostLatentValueFeatures : kMostMatrixFeatures) &&
      cache.page_stride % elements == 0 && cache.first_element % elements == 0 &&
      SlabsAreAligned(cache);
  if (!matrix) return AttentionKernels::kExact;
  return latent ? AttentionKernels::kLatent : AttentionKernels::kMatrix;
}

AttentionPlan PlanOf(const PagedAttentionCall& call, AttentionKernels kernels) {
  const AttentionShape shape = ShapeOf(call);
  switch (kernels) {
    case AttentionKernels::kExact:
      return PlanAttention(shape, Multiprocessors());
    case AttentionKernels::kMatrix:
      return PlanMatrixAttention(shape, Multiprocessors());
    case AttentionKernels::kLatent:
      return PlanLatentAttention(shape, Multiprocessors());
  }
  return {};
}

}  // namespace

int64_t CudaDecoder::WorkspaceBytes(const PagedAttentionCall& call) const {
  return SlabTableBytes(call.cache) + PlanOf(call, KernelsOf(call)).partial_bytes;
}

Status CudaDecoder::Run(const PagedAttentionCall& call, const OperationContext& context) const {
  const AttentionShape shape = ShapeOf(call);
  MARLIN_RETURN_IF_ERROR(
      CheckFeatures(call.cache.key_dim, shape.value_dim, shape.rows * shape.group));
  const AttentionKernels kernels = KernelsOf(call);
  const bool matrix = kernels == AttentionKernels::kMatrix;
  const AttentionPlan plan = PlanOf(call, kernels);
  auto* const partials = static_cast<uint8_t*>(context.workspace) + SlabTableBytes(call.cache);
  AttentionArguments args =
      ArgumentsOf(shape, plan, call.queries, call.out, call.options, partials);
  args.sequences = SequencesOf(call.rows);
  args.errors = errors_.view();
  cudaStream_t const stream = StreamOf(context);
  const int64_t counters =
      RoundUp(plan.tiles * shape.kv_heads * int64_t{sizeof(uint32_t)}, kBufferAlignment);
  const SplitKScratch::Lease scratch = matrix && plan.segments > 1
                                           ? scratch_.Lend(stream, context.workspace, counters)
                                           : SplitKScratch::Lease();
  args.counters = scratch.words();
  return Enqueue("attention", [&] {
    const cudaError_t error = PagesOf(call.cache, context.workspace, stream, &args.pages);
    if (error != cudaSuccess) return error;
    if (kernels == AttentionKernels::kLatent) return LaunchLatentAttention(args, stream);
    if (!matrix) return LaunchAttention(args, stream);
    return plan.segments == 0 ? LaunchPrefillAttention(args, stream)
                              : LaunchDecodeAttention(args, stream);
  });
}

// The kernel switches on these numbers.
static_assert(static_cast<int>(RouterOptions::Scoring::kSoftmaxOfChosen) == 1);
static_assert(static_cast<int>(RouterOptions::Scoring::kSigmoid) == 2);

namespace {

/// A selection's arguments without its logits.
RouterArguments SelectionOf(const RouterOptions& options, int64_t experts,
                            const MutableTensorView& ids, const MutableTensorView& weights) {
  RouterArguments args;
  args.ids = ids.As<int32_t>();
  args.ids_stride = ids.stride(0);
  args.weights = weights.As<float>();
  args.weights_stride = weights.stride(0);
  args.bias = options.choice_bias.As<float>();
  args.tokens = static_cast<int>(ids.dim(0));
  args.experts = static_cast<int>(experts);
  args.top_k = static_cast<int>(options.top_k);
  args.scoring = static_cast<int>(options.scoring);
  args.groups = static_cast<int>(options.groups);
  args.top_groups = static_cast<int>(options.top_groups);
  args.normalize = options.normalize;
  args.scaling_factor = static_cast<double>(options.scaling_factor);
  return args;
}

/// The plan of a router's matrix, if it has bf16 tiles and a shape that is supported.
std::optional<RouterPlan> PlanOf(const PreparedTiles& matrix, int shared_bytes) {
  const WeightsSpec& spec = matrix.spec;
  const bool tiles = matrix.traits.tiled && matrix.kind() == CodeKind::kDense16 &&
                     spec.format == Format::kBf16 && spec.experts == 1 && !TransformsInput(spec);
  if (!tiles || spec.k > kMostIndex || spec.n > kMostTeamExperts) return std::nullopt;
  return PlanRouter({static_cast<int>(spec.k), static_cast<int>(spec.n)}, shared_bytes);
}

}  // namespace

bool CudaDecoder::RoutesRows(const RouteRowsCall& call) const {
  const TensorView& x = call.x;
  const bool rows = x.dtype() == DType::kF32 && x.rank() == 2 && x.stride(1) == 1 &&
                    x.stride(0) % 4 == 0 && reinterpret_cast<uintptr_t>(x.data()) % 16 == 0 &&
                    x.dim(0) <= kMostIndex;
  const bool bias = call.bias.empty() || call.bias.dtype() == DType::kF32;
  return rows && bias &&
         PlanOf(static_cast<const PreparedTiles&>(call.matrix), shape_.shared_bytes).has_value();
}

Status CudaDecoder::RouteRows(const RouteRowsCall& call, const OperationContext& context) const {
  const auto& matrix = static_cast<const PreparedTiles&>(call.matrix);
  const std::optional<RouterPlan> plan = PlanOf(matrix, shape_.shared_bytes);
  if (!plan.has_value()) return Status(Code::kInternal, "router: a call that has no plan");
  RouteRowsArguments args;
  args.plan = *plan;
  args.router = SelectionOf(call.options, matrix.spec.n, call.ids, call.weights);
  args.logits = static_cast<float*>(context.workspace);
  args.router.logits = args.logits;
  args.router.logits_stride = matrix.spec.n;
  args.router.errors = errors_.view();
  args.x = call.x.As<float>();
  args.x_stride = call.x.stride(0);
  args.hidden = static_cast<int>(matrix.spec.k);
  args.bias = call.bias.As<float>();
  args.weights = matrix.Tiles(0);
  return Enqueue("moe_router", [&] { return LaunchRouteRows(args, StreamOf(context)); });
}

Status CudaDecoder::Run(const RouteTokensCall& call, const OperationContext& context) const {
  if (call.logits.dim(1) > kMostRouterExperts) {
    return Status(Code::kUnsupported, fmt::format("router: {} experts; supported: up to {}",
                                                  call.logits.dim(1), kMostRouterExperts));
  }
  RouterArguments args = SelectionOf(call.options, call.logits.dim(1), call.ids, call.weights);
  args.logits = call.logits.As<float>();
  args.logits_stride = call.logits.stride(0);
  args.errors = errors_.view();
  return Enqueue("moe_router_topk", [&] { return LaunchRouter(args, StreamOf(context)); });
}

Status CudaDecoder::Run(const ResetSamplerCall& call, const OperationContext& context) const {
  ResetArguments args;
  args.options = SamplingOf(call.options);
  args.state = static_cast<SamplerState*>(call.state.data());
  args.vocab = call.vocab;
  args.prompt = call.prompt.As<int32_t>();
  args.tokens = call.prompt.dim(0);
  args.errors = errors_.view();
  return Enqueue("reset_sampler", [&] { return LaunchResetSampler(args, StreamOf(context)); });
}

Status CudaDecoder::Run(const SampleTokensCall& call, const OperationContext& context) const {
  SampleArguments args;
  args.logits = call.logits.As<float>();
  args.logits_stride = call.logits.stride(0);
  args.states = call.states.As<uint8_t>();
  args.state_stride = call.states.stride(0);
  args.tokens = call.tokens.As<int32_t>();
  args.tokens_stride = call.tokens.stride(0);
  args.rows = static_cast<int>(call.logits.dim(0));
  args.state_rows = call.state_rows.As<int32_t>();
  args.states_count = static_cast<int>(call.states.dim(0));
  args.vocab = static_cast<int>(call.logits.dim(1));
  args.errors = errors_.view();
  return Enqueue("sample", [&] { return LaunchSample(args, StreamOf(context)); });
}

Status CudaDecoder::Run(const AdvanceTokensCall& call, const OperationContext& context) const {
  AdvanceArguments args;
  args.sampled = call.sampled.As<int32_t>();
  args.stop_ids = call.stop_ids.As<int32_t>();
  args.stop_count = call.stop_ids.dim(0);
  args.ids = call.ids.As<int32_t>();
  args.positions = call.positions.As<int32_t>();
  args.state_rows = call.state_rows.As<int32_t>();
  args.counts = call.counts.As<int32_t>();
  args.tokens = call.tokens.As<int32_t>();
  args.rows = call.sampled.dim(0);
  args.steps = call.tokens.dim(1);
  args.errors = errors_.view();
  return Enqueue("advance", [&] { return LaunchAdvance(args, StreamOf(context)); });
}

}  // namespace marlin::cuda
