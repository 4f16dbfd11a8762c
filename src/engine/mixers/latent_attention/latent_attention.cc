// The operations of latent attention in a step.
#include "engine/mixers/latent_attention/latent_attention.h"

#include <algorithm>

#include "base/macros.h"
#include "engine/mixers/latent_attention/absorb.h"
#include "engine/mixers/latent_attention/expand.h"
#include "engine/mixers/paged_attention.h"
#include "model/placement.h"
#include "ops/decoder/expand_latents.h"

namespace marlin {
namespace {

const AbsorbedProjection& AbsorbedOf(const Pass& pass, int64_t layer) {
  return static_cast<const AbsorbedProjection&>(*pass.layer(layer).mixer.converted);
}

Status Rotate(const Pass& pass, int64_t layer, const MutableTensorView& heads) {
  return ApplyRotary(pass.device, RotaryOf(pass.decoder, layer), pass.values.positions, heads,
                     pass.stream());
}

/// Columns [first, first + width) of every head of rows.
MutableTensorView Columns(const MutableTensorView& rows, int64_t heads, int64_t stride,
                          int64_t first, int64_t width) {
  return {rows.As<float>() + first,
          DType::kF32,
          {rows.dim(0), heads, width},
          {rows.stride(0), stride, 1}};
}

/// Rotates the RoPE part of the latents and of the queries, `rope_queries`, and caches the latents.
Status CacheLatents(const Pass& pass, int64_t layer, const MutableTensorView& rope_queries) {
  const Dimensions& shape = pass.decoder.config.shape;
  const MutableTensorView& latent = pass.values.latent;
  MARLIN_RETURN_IF_ERROR(Rotate(pass, layer, HeadsIn(latent, shape.kv_rank, 1, shape.rope_dim)));
  MARLIN_RETURN_IF_ERROR(AppendToCache(pass.device,
                                       HeadsIn(latent, 0, 1, shape.kv_rank + shape.rope_dim), {},
                                       RowsOf(pass, layer), CacheOf(pass, layer), pass.stream()));
  MARLIN_RETURN_IF_ERROR(Rotate(pass, layer, rope_queries));
  return Ended(pass, StepPart::kRotateAppend);
}

/// The latent form: all query heads share one key of the cache, the latent and the RoPE
/// part, and its value, the latent. A query without RoPE is multiplied by its head's part of kv_b
/// instead of the latent, and so is what attention mixes of the latents.
Status AttendToLatents(const Pass& pass, int64_t layer) {
  const StepValues& values = pass.values;
  const Dimensions& shape = pass.decoder.config.shape;
  const AbsorbedProjection& kv_b = AbsorbedOf(pass, layer);
  const int64_t rows = pass.rows();
  const int64_t rank = shape.kv_rank;
  const int64_t wide = rank + shape.rope_dim;
  const int64_t query_dim = shape.nope_dim + shape.rope_dim;
  HeadProductOptions options;
  options.accuracy = pass.products.accuracy;
  options.determinism = pass.products.determinism;
  const ArenaScope scope(pass.arena);
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView wide_queries,
                          pass.arena.Take(DType::kF32, {rows, shape.heads * wide}));
  const auto query = [&](int64_t first, int64_t width) {
    return Columns(values.projected, shape.heads, query_dim, first, width);
  };
  const auto wide_query = [&](int64_t first, int64_t width) {
    return Columns(wide_queries, shape.heads, wide, first, width);
  };
  MARLIN_RETURN_IF_ERROR(Convert(pass.device, query(shape.nope_dim, shape.rope_dim),
                                 wide_query(rank, shape.rope_dim), pass.stream()));
  MARLIN_RETURN_IF_ERROR(CacheLatents(pass, layer, wide_query(rank, shape.rope_dim)));
  MARLIN_RETURN_IF_ERROR(HeadProduct(pass.device, query(0, shape.nope_dim), kv_b.key_matrices,
                                     wide_query(0, rank), options, pass.stream()));
  MARLIN_RETURN_IF_ERROR(Ended(pass, StepPart::kHeadProduct));
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView mixed,
                          pass.arena.Take(DType::kF32, {rows, shape.heads, rank}));
  MARLIN_RETURN_IF_ERROR(
      Attend(pass, {wide_query(0, wide), RowsOf(pass, layer), CacheOf(pass, layer), mixed,
                    AttentionOptionsOf(pass, layer)}));
  const MutableTensorView out = MixedHeads(pass, layer, shape.heads, shape.v_dim);
  MARLIN_RETURN_IF_ERROR(
      HeadProduct(pass.device, mixed, kv_b.value_matrices, out, options, pass.stream()));
  return Ended(pass, StepPart::kHeadProduct);
}

/// Matrices [first, first + count) of [heads, ...].
TensorView HeadsOf(const TensorView& matrices, int64_t first, int64_t count) {
  const auto* const data = matrices.As<uint8_t>();
  return {data + first * matrices.stride(0) * DTypeBytes(matrices.dtype()),
          matrices.dtype(),
          {count, matrices.dim(1), matrices.dim(2)}};
}

/// The expanded form: the visible latents become keys and values of heads, some heads at a
/// time.
Status AttendToHeads(const Pass& pass, int64_t layer, const ExpandedPages& pages) {
  const DecoderConfig& config = pass.decoder.config;
  const Dimensions& shape = config.shape;
  const AbsorbedProjection& kv_b = AbsorbedOf(pass, layer);
  const PagedCache latents = CacheOf(pass, layer);
  const ExpandedMemory memory(config, latents.type, pass.products.accuracy,
                              ReadsHostMemory(pass.device));
  const int64_t key_dim = shape.nope_dim + shape.rope_dim;
  const MutableTensorView queries = HeadsIn(pass.values.projected, 0, shape.heads, key_dim);
  MARLIN_RETURN_IF_ERROR(CacheLatents(
      pass, layer,
      Columns(pass.values.projected, shape.heads, key_dim, shape.nope_dim, shape.rope_dim)));
  MARLIN_ASSIGN_OR_RETURN(void* const slab, pass.arena.Expanded(memory.bytes()));
  PagedCache cache = latents;
  cache.slabs = {&slab, 1};
  cache.slab_pages = pages.pages.dim(0);
  cache.first_element = 0;
  cache.type = memory.type();
  cache.key_dim = key_dim;
  cache.value_dim = shape.v_dim;
  cache.values_in_keys = false;
  SequenceRows rows = RowsOf(pass, layer);
  rows.block_tables = pages.block_tables;
  const AttentionOptions options = AttentionOptionsOf(pass, layer);
  const int64_t most = memory.HeadsAtATime(cache.slab_pages, cache.page_tokens);
  const MutableTensorView all = MixedOf(pass, layer);
  for (int64_t first = 0; first < shape.heads; first += most) {
    const int64_t count = std::min(most, shape.heads - first);
    cache.kv_heads = count;
    cache.page_stride = count * cache.page_tokens * (key_dim + shape.v_dim);
    MARLIN_RETURN_IF_ERROR(ExpandLatents(
        pass.device, latents, pages.pages, pages.tokens, HeadsOf(kv_b.key_matrices, first, count),
        HeadsOf(kv_b.value_matrices, first, count), cache, pass.stream()));
    MARLIN_RETURN_IF_ERROR(Ended(pass, StepPart::kHeadProduct));
    const TensorView some(queries.As<float>() + first * key_dim, DType::kF32,
                          {pass.rows(), count, key_dim}, {queries.stride(0), key_dim, 1});
    const MutableTensorView out(all.As<uint8_t>() + first * shape.v_dim * DTypeBytes(all.dtype()),
                                all.dtype(), {pass.rows(), count, shape.v_dim},
                                {all.stride(0), shape.v_dim, 1});
    MARLIN_RETURN_IF_ERROR(Attend(pass, {some, rows, cache, out, options}));
  }
  return {};
}

Status NormalizeLatent(const Pass& pass, const DeviceVector& norm, const MutableTensorView& x) {
  const float epsilon = ParametersOf(MixerKind::kLatentAttention).NormEpsilon();
  MARLIN_RETURN_IF_ERROR(RmsNorm(pass.device, x, norm.view(), epsilon, x, pass.stream()));
  return Ended(pass, StepPart::kNorm);
}

Status Project(Pass& pass, int64_t index) {
  const ArenaScope scope(pass.arena);
  const StepValues& values = pass.values;
  const std::vector<Projection>& projections = pass.layer(index).mixer.projections;
  const std::vector<DeviceVector>& norms = pass.layer(index).mixer.vectors;
  const auto apply = [&](LatentProjection projection, const TensorView& x,
                         const MutableTensorView& out) -> Status {
    MARLIN_RETURN_IF_ERROR(Apply(pass.device, projections[projection], x, pass.products, out));
    return Ended(pass, StepPart::kQkv);
  };
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView x,
                          pass.arena.Take(pass.products.activations, values.hidden.shape()));
  MARLIN_RETURN_IF_ERROR(NormalizeHidden(pass, pass.layer(index).input_norm, x));
  TensorView query;
  if (!projections[kQ].empty()) {
    MARLIN_RETURN_IF_ERROR(apply(kQ, x, values.projected));
  } else {
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView low,
                            pass.arena.Take(DType::kF32, {pass.rows(), projections[kQA].out}));
    query = low;
    MARLIN_RETURN_IF_ERROR(apply(kQA, x, low));
    MARLIN_RETURN_IF_ERROR(NormalizeLatent(pass, norms[kQANorm], low));
    MARLIN_RETURN_IF_ERROR(apply(kQB, low, values.projected));
  }
  MARLIN_RETURN_IF_ERROR(apply(kKvA, x, values.latent));
  const MutableTensorView latent(values.latent.data(), DType::kF32,
                                 {pass.rows(), pass.decoder.config.shape.kv_rank},
                                 {values.latent.stride(0), 1});
  MARLIN_RETURN_IF_ERROR(NormalizeLatent(pass, norms[kKvANorm], latent));
  if (pass.inputs == nullptr) return {};
  if (!query.empty()) MARLIN_RETURN_IF_ERROR(pass.inputs->Add(kQueryInput, query));
  return pass.inputs->Add(kLatentInput, latent);
}

}  // namespace

std::vector<MixerOperation> LatentAttention::Operations() const {
  using enum DecoderOperation;
  return {{StepKind::kLatentProject, {kRmsNorm, kAddRmsNorm}},
          {StepKind::kAttention, PagedAttentionOperations()}};
}

void LatentAttention::Describe(const DescribedLayer& layer,
                               std::vector<StepOperation>* operations) const {
  const MixerLayer& mixer = layer.layer().mixer;
  const auto linear = [&](LatentProjection projection) {
    return DescribeLinear(mixer.projections[projection]);
  };
  operations->emplace_back(
      LatentProjectStep{layer.index, DescribeHiddenNorm(layer), linear(kQ), linear(kQA),
                        DescribeNorm(mixer.vectors[kQANorm], NormEpsilon()), linear(kQB),
                        linear(kKvA), DescribeNorm(mixer.vectors[kKvANorm], NormEpsilon())});
  AttentionStep step = DescribeAttention(layer);
  step.rope_dim = layer.decoder.config.shape.rope_dim;
  const auto& absorbed = static_cast<const AbsorbedProjection&>(*mixer.converted);
  step.latent_keys = absorbed.key_matrices;
  step.latent_values = absorbed.value_matrices;
  operations->emplace_back(step);
}

Status LatentAttention::TakeValues(Pass* pass) const {
  const Dimensions& shape = pass->decoder.config.shape;
  const auto take = [&](int64_t width) {
    return pass->arena.Take(DType::kF32, {pass->rows(), width});
  };
  MARLIN_ASSIGN_OR_RETURN(pass->values.projected,
                          take(shape.heads * (shape.nope_dim + shape.rope_dim)));
  MARLIN_ASSIGN_OR_RETURN(pass->values.latent, take(shape.kv_rank + shape.rope_dim));
  return {};
}

Status LatentAttention::Run(Pass& pass, StepKind kind, int64_t layer) const {
  if (kind == StepKind::kLatentProject) return Project(pass, layer);
  const DecoderConfig& config = pass.decoder.config;
  if (const PositionScale& scale = config.layer(layer).query_scale; scale.beta != 0.0F) {
    const int64_t width = config.shape.nope_dim + config.shape.rope_dim;
    MARLIN_RETURN_IF_ERROR(ScaleByPosition(
        pass.device, scale, pass.values.positions,
        HeadsIn(pass.values.projected, 0, config.shape.heads, width), pass.stream()));
  }
  const ExpandedPages& pages = pass.values.pages[pass.pool.GroupOf(layer)].expanded;
  return pages.pages.empty() ? AttendToLatents(pass, layer) : AttendToHeads(pass, layer, pages);
}

int64_t LatentAttention::ExpandedBytes(const PassSetting& setting) const {
  if (setting.determinism == Determinism::kBatchInvariant) return 0;
  if (!HasExpandLatents(setting.device)) return 0;
  return ExpandedMemory(setting.config, setting.cache_type, setting.accuracy,
                        ReadsHostMemory(setting.device))
      .bytes();
}

bool LatentAttention::Expands(const PassSetting& setting,
                              std::span<const PassSequence> sequences) const {
  return ExpandsLatents(setting.device, setting.config, sequences, setting.determinism);
}

ExpandedTables LatentAttention::Expand(const PassSetting& setting,
                                       std::span<const PassSequence> sequences,
                                       std::span<const int32_t> block_tables) const {
  ExpandedTables tables = TablesOf(sequences, block_tables, setting.page_tokens);
  const ExpandedMemory memory(setting.config, setting.cache_type, setting.accuracy,
                              ReadsHostMemory(setting.device));
  const auto pages = static_cast<int64_t>(tables.pages.size());
  if (memory.HeadsAtATime(pages, setting.page_tokens) == 0) return {};
  return tables;
}

const Mixer& LatentAttentionMixer() {
  static const LatentAttention kMixer;
  return kMixer;
}

}  // namespace marlin
