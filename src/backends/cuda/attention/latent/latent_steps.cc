#include "backends/cuda/attention/latent/latent_steps.h"

#include <algorithm>
#include <bit>
#include <map>
#include <memory>
#include <mutex>
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

class LatentSteps final : public FusedOperations {
 public:
  LatentSteps(PersistentPool& pool, const ValueErrors& errors, SplitKScratch& scratch,
              const DeviceShape& shape, const AttentionStep& step)
      : pool_(pool), errors_(errors), scratch_(scratch), shape_(shape), step_(step) {}

  bool Takes(const StepValues& values) const override {
    const StepPages& pages = values.pages[step_.cache_group];
    return values.rows() <= kMostRows && pages.expanded.pages.empty() &&
           std::ssize(pages.slabs) <= kMostSlabParameters;
  }

  Status Run(const StepValues& values, void* stream) const override {
    const std::shared_ptr<DeviceHandle>& device = pool_.device();
    MARLIN_RETURN_IF_ERROR(device->errors.Lost());
    const DeviceScope scope(device->index);
    const StepPages& pages = values.pages[step_.cache_group];
    PagedCache cache = step_.cache;
    cache.slabs = pages.slabs;
    const SequenceRows sequences = {values.positions, values.first_rows, pages.block_tables};
    const int64_t rows = values.rows();
    const int64_t rank = cache.value_dim;
    const auto bytes_of = [&](int64_t width) {
      return RoundUp(rows * step_.heads * width * int64_t{sizeof(float)}, kBufferAlignment);
    };
    const int64_t wide_bytes = bytes_of(cache.key_dim);
    const int64_t mixed_bytes = bytes_of(rank);
    MutableTensorView wide(nullptr, DType::kF32, {rows, step_.heads, cache.key_dim});
    MutableTensorView mixed(nullptr, DType::kF32, {rows, step_.heads, rank});
    const int64_t workspace =
        WorkspaceBytes(PagedAttentionCall{wide, sequences, cache, mixed, step_.options}, shape_);
    MARLIN_ASSIGN_OR_RETURN(uint8_t* const memory,
                            MemoryOf(wide_bytes + mixed_bytes + workspace, stream));
    wide = {memory, DType::kF32, {rows, step_.heads, cache.key_dim}};
    mixed = {memory + wide_bytes, DType::kF32, {rows, step_.heads, rank}};
    const CallContext context = {static_cast<cudaStream_t>(stream),
                                 memory + wide_bytes + mixed_bytes,
                                 errors_.view(),
                                 device->errors,
                                 scratch_,
                                 shape_};
    PrepareLatentsArguments prepare = PrepareOf(values, sequences, cache, memory);
    MARLIN_RETURN_IF_ERROR(
        context.Check(PagesOf(cache, context, &prepare.pages), "prepare_latents"));
    const int64_t nope = step_.latent_keys.dim(2);
    const HeadProductOptions options;
    const MutableTensorView queries =
        Columns(values.projected.data(), rows, step_.heads, nope + step_.rope_dim, 0, nope);
    MARLIN_RETURN_IF_ERROR(
        RunPreparedProduct({queries, step_.latent_keys,
                            Columns(memory, rows, step_.heads, cache.key_dim, 0, rank), options},
                           prepare, context));
    MARLIN_RETURN_IF_ERROR(
        cuda::Run(PagedAttentionCall{wide, sequences, cache, mixed, step_.options}, context));
    const MutableTensorView out(values.mixed.data(), values.mixed.dtype(),
                                {rows, step_.heads, step_.latent_values.dim(1)});
    return cuda::Run(HeadProductCall{mixed, step_.latent_values, out, options}, context);
  }

 private:
  /// Without pages.
  PrepareLatentsArguments PrepareOf(const StepValues& values, const SequenceRows& sequences,
                                    const PagedCache& cache, void* wide) const {
    const int64_t rows = values.rows();
    const int64_t nope = step_.latent_keys.dim(2);
    PrepareLatentsArguments args;
    args.queries = RowsOf(Columns(values.projected.data(), rows, step_.heads, nope + step_.rope_dim,
                                  nope, step_.rope_dim));
    args.wide =
        RowsOf(Columns(wide, rows, step_.heads, cache.key_dim, cache.value_dim, step_.rope_dim));
    args.latents = RowsOf(values.latent);
    args.heads = static_cast<int>(step_.heads);
    args.rope = static_cast<int>(step_.rope_dim);
    args.rotary = RotaryOf(step_.rotary);
    args.sequences = SequencesOf(sequences);
    args.errors = errors_.view();
    return args;
  }

  /// Memory of a stream, which runs of other layers use, too. It is kept: recorded steps have its
  /// address.
  Result<uint8_t*> MemoryOf(int64_t bytes, void* stream) const {
    const auto log2 = static_cast<int>(std::bit_width(static_cast<uint64_t>(bytes - 1)));
    std::shared_ptr<StreamMemory> memory;
    {
      const std::lock_guard lock(mutex_);
      std::shared_ptr<StreamMemory>& found = memory_[log2];
      if (found == nullptr) found = pool_.Memory({-log2}, int64_t{1} << log2);
      memory = found;
    }
    return memory->Of(static_cast<cudaStream_t>(stream));
  }

  PersistentPool& pool_;
  const ValueErrors& errors_;
  SplitKScratch& scratch_;
  const DeviceShape& shape_;
  const AttentionStep step_;
  mutable std::mutex mutex_;
  mutable std::map<int, std::shared_ptr<StreamMemory>> memory_;  ///< By log2 of the bytes.
};

}  // namespace

Result<FusedRun> FuseLatentAttention(PersistentPool& pool, const ValueErrors& errors,
                                     SplitKScratch& scratch, const DeviceShape& shape,
                                     const StepDescription& step, const AttentionStep& attention) {
  const bool fuses = attention.rope_dim != 0 && attention.cache.values_in_keys &&
                     attention.query_scale.beta == 0.0F && step.accuracy == Accuracy::kDefault &&
                     step.determinism == Determinism::kDefault;
  if (!fuses) return FusedRun();
  const DeviceScope scope(pool.device()->index);
  for (const auto load : {LoadPrepareLatents, LoadPreparedProduct}) {
    MARLIN_RETURN_IF_ERROR(pool.device()->errors.Check(load(), "prepare_latents"));
  }
  return FusedRun{1, std::make_unique<LatentSteps>(pool, errors, scratch, shape, attention), {}};
}

}  // namespace marlin::cuda
