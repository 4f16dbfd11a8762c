#include "backends/cuda/attention/latent/latent_steps.h"

#include <iterator>
#include <memory>
#include <utility>

#include "backends/cuda/attention/latent/prepare_latents.h"
#include "backends/cuda/decoder/views.h"
#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

/// More rows read so much of the cache that launches do not count.
constexpr int64_t kMostRows = 8;

/// Columns [first, first + width) of every head of f32 rows.
MutableTensorView Columns(void* rows, int64_t count, int64_t heads, int64_t stride, int64_t first,
                          int64_t width) {
  return {static_cast<float*>(rows) + first,
          DType::kF32,
          {count, heads, width},
          {heads * stride, stride, 1}};
}

/// Attention of a step's queries in the space of the latents. The queries, and then the results,
/// are at the beginning of a workspace.
struct LatentAttention {
  LatentAttention(const AttentionStep& step, const StepValues& values, uint8_t* workspace)
      : cache(step.cache), options(step.options) {
    const StepPages& pages = values.pages[step.cache_group];
    cache.slabs = pages.slabs;
    rows = {values.positions, values.first_rows, pages.block_tables};
    queries = {workspace, DType::kF32, {values.rows(), step.heads, cache.key_dim}};
    uint8_t* const after = workspace == nullptr ? nullptr : workspace + BytesOf(queries);
    mixed = {after, DType::kF32, {values.rows(), step.heads, cache.value_dim}};
  }

  PagedAttentionCall Call() const { return {queries, rows, cache, mixed, options}; }
  /// Size of queries and results.
  int64_t bytes() const { return BytesOf(queries) + BytesOf(mixed); }
  static int64_t BytesOf(const MutableTensorView& view) {
    return RoundUp(view.ByteCount(), kBufferAlignment);
  }

  PagedCache cache;
  const AttentionOptions& options;
  SequenceRows rows;
  MutableTensorView queries;
  MutableTensorView mixed;
};

class LatentSteps final : public FusedOperations {
 public:
  LatentSteps(std::shared_ptr<DeviceHandle> device, const ValueErrors& errors,
              SplitKScratch& scratch, const DeviceShape& shape, const AttentionStep& step)
      : device_(std::move(device)),
        errors_(errors),
        scratch_(scratch),
        shape_(shape),
        step_(step) {}

  bool Takes(const StepValues& values) const override {
    const StepPages& pages = values.pages[step_.cache_group];
    return values.rows() <= kMostRows && pages.expanded.pages.empty() &&
           std::ssize(pages.slabs) <= kMostSlabParameters;
  }

  int64_t WorkspaceBytes(const StepValues& values) const override {
    const LatentAttention attention(step_, values, nullptr);
    return attention.bytes() + cuda::WorkspaceBytes(attention.Call(), shape_);
  }

  Status Run(const StepValues& values, const OperationContext& operation) const override {
    MARLIN_RETURN_IF_ERROR(device_->errors.Lost());
    const DeviceScope scope(device_->index);
    auto* const memory = static_cast<uint8_t*>(operation.workspace);
    const LatentAttention attention(step_, values, memory);
    const CallContext context = {static_cast<cudaStream_t>(operation.stream),
                                 memory + attention.bytes(),
                                 errors_.view(),
                                 device_->errors,
                                 scratch_,
                                 shape_};
    const int64_t rows = values.rows();
    PrepareLatentsArguments prepare = PrepareOf(values, attention);
    MARLIN_RETURN_IF_ERROR(
        context.Check(PagesOf(attention.cache, context, &prepare.pages), "prepare_latents"));
    const int64_t nope = step_.latent_keys.dim(2);
    const HeadProductOptions options;
    const MutableTensorView queries =
        Columns(values.projected.data(), rows, step_.heads, nope + step_.rope_dim, 0, nope);
    const MutableTensorView latent_queries = Columns(attention.queries.data(), rows, step_.heads,
                                                     step_.cache.key_dim, 0, step_.cache.value_dim);
    MARLIN_RETURN_IF_ERROR(RunPreparedProduct({queries, step_.latent_keys, latent_queries, options},
                                              prepare, context));
    MARLIN_RETURN_IF_ERROR(cuda::Run(attention.Call(), context));
    const MutableTensorView out(values.mixed.data(), values.mixed.dtype(),
                                {rows, step_.heads, step_.latent_values.dim(1)});
    return cuda::Run(HeadProductCall{attention.mixed, step_.latent_values, out, options}, context);
  }

 private:
  /// Without pages.
  PrepareLatentsArguments PrepareOf(const StepValues& values,
                                    const LatentAttention& attention) const {
    const int64_t rows = values.rows();
    const int64_t nope = step_.latent_keys.dim(2);
    PrepareLatentsArguments args;
    args.queries = RowsOf(Columns(values.projected.data(), rows, step_.heads, nope + step_.rope_dim,
                                  nope, step_.rope_dim));
    args.wide = RowsOf(Columns(attention.queries.data(), rows, step_.heads, step_.cache.key_dim,
                               step_.cache.value_dim, step_.rope_dim));
    args.latents = RowsOf(values.latent);
    args.heads = static_cast<int>(step_.heads);
    args.rope = static_cast<int>(step_.rope_dim);
    args.rotary = RotaryOf(step_.rotary);
    args.sequences = SequencesOf(attention.rows);
    args.errors = errors_.view();
    return args;
  }

  const std::shared_ptr<DeviceHandle> device_;
  const ValueErrors& errors_;
  SplitKScratch& scratch_;
  const DeviceShape& shape_;
  const AttentionStep step_;
};

}  // namespace

Result<FusedRun> FuseLatentAttention(const std::shared_ptr<DeviceHandle>& device,
                                     const ValueErrors& errors, SplitKScratch& scratch,
                                     const DeviceShape& shape, const StepDescription& step,
                                     const AttentionStep& attention) {
  const bool fuses = attention.rope_dim != 0 && attention.cache.values_in_keys &&
                     attention.query_scale.beta == 0.0F && step.accuracy == Accuracy::kDefault &&
                     step.determinism == Determinism::kDefault;
  if (!fuses) return FusedRun();
  const DeviceScope scope(device->index);
  for (const auto load : {LoadPrepareLatents, LoadPreparedProduct}) {
    MARLIN_RETURN_IF_ERROR(device->errors.Check(load(), "prepare_latents"));
  }
  return FusedRun{1, std::make_unique<LatentSteps>(device, errors, scratch, shape, attention), {}};
}

}  // namespace marlin::cuda
