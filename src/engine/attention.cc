#include <algorithm>

#include "base/macros.h"
#include "engine/expand.h"
#include "engine/forward.h"
#include "marlin/decoder.h"
#include "model/placement.h"
#include "ops/decoder/expand_latents.h"
#include "plan/step/decoder_calls.h"

namespace marlin {
namespace {

/// The heads in columns [first, first + heads * dim) of rows.
MutableTensorView Heads(const MutableTensorView& rows, int64_t first, int64_t heads, int64_t dim) {
  return {
      rows.As<float>() + first, DType::kF32, {rows.dim(0), heads, dim}, {rows.stride(0), dim, 1}};
}

RotaryEmbedding RotaryOf(const Pass& pass) {
  const DecoderConfig& config = pass.decoder.config;
  return {pass.decoder.inverse_frequencies.view(), config.rotary.attention_factor,
          config.interleaved_rotary};
}

Status Rotate(const Pass& pass, const MutableTensorView& heads) {
  return ApplyRotary(pass.device, RotaryOf(pass), pass.values.positions, heads, pass.stream());
}

SequenceRows RowsOf(const Pass& pass, int64_t layer) {
  const StepPages& pages = pass.values.pages[pass.pool.GroupOf(layer)];
  return {pass.values.positions, pass.values.first_rows, pages.block_tables};
}

PagedCache CacheOf(const Pass& pass, int64_t layer) {
  return pass.pool.CacheOf(layer, pass.values.pages[pass.pool.GroupOf(layer)].slabs);
}

AttentionOptions OptionsOf(const Pass& pass, int64_t layer, const TensorView& sinks) {
  const DecoderConfig& config = pass.decoder.config;
  AttentionOptions options;
  options.scale = config.score_scale;
  options.window = config.windows[static_cast<size_t>(layer)];
  options.sinks = sinks;
  options.accuracy = pass.products.accuracy;
  options.determinism = pass.products.determinism;
  return options;
}

Status Attend(const Pass& pass, const PagedAttentionCall& call) {
  MARLIN_RETURN_IF_ERROR(PagedAttention(pass.device, call.queries, call.rows, call.cache, call.out,
                                        call.options, pass.stream()));
  return Ended(pass, StepPart::kAttention);
}

/// The views of an MLA step: columns of every head of rows of `projected` or of others.
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
  MARLIN_RETURN_IF_ERROR(Rotate(pass, Heads(latent, shape.kv_rank, 1, shape.rope_dim)));
  MARLIN_RETURN_IF_ERROR(AppendToCache(pass.device,
                                       Heads(latent, 0, 1, shape.kv_rank + shape.rope_dim), {},
                                       RowsOf(pass, layer), CacheOf(pass, layer), pass.stream()));
  MARLIN_RETURN_IF_ERROR(Rotate(pass, rope_queries));
  return Ended(pass, StepPart::kRotateAppend);
}

/// MLA in its latent form: all query heads share one key of the cache, the latent and the RoPE
/// part, and its value, the latent. A query without RoPE is multiplied by its head's part of kv_b
/// instead of the latent, and so is what attention mixes of the latents.
Status AttendToLatents(const Pass& pass, int64_t layer) {
  const StepValues& values = pass.values;
  const Dimensions& shape = pass.decoder.config.shape;
  const AbsorbedProjection& kv_b = pass.layer(layer).latent.kv_b;
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
  MARLIN_RETURN_IF_ERROR(Attend(pass, {wide_query(0, wide), RowsOf(pass, layer),
                                       CacheOf(pass, layer), mixed, OptionsOf(pass, layer, {})}));
  const MutableTensorView& all = values.mixed;
  const MutableTensorView out(all.data(), all.dtype(), {rows, shape.heads, shape.v_dim});
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

/// MLA in its expanded form: the visible latents become keys and values of heads, some heads at a
/// time.
Status AttendToHeads(const Pass& pass, int64_t layer, const ExpandedPages& pages) {
  const DecoderConfig& config = pass.decoder.config;
  const Dimensions& shape = config.shape;
  const AbsorbedProjection& kv_b = pass.layer(layer).latent.kv_b;
  const PagedCache latents = CacheOf(pass, layer);
  const ExpandedMemory memory(config, latents.type, pass.products.accuracy,
                              ReadsHostMemory(pass.device));
  const int64_t key_dim = config.key_dim();
  const MutableTensorView queries = Heads(pass.values.projected, 0, shape.heads, key_dim);
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
  const AttentionOptions options = OptionsOf(pass, layer, {});
  const int64_t most = memory.HeadsAtATime(cache.slab_pages, cache.page_tokens);
  const MutableTensorView& all = pass.values.mixed;
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

/// norm(x) for the norms inside MLA, whose epsilon the config does not set.
Status NormalizeLatent(const Pass& pass, const DeviceVector& norm, const MutableTensorView& x) {
  MARLIN_RETURN_IF_ERROR(RmsNorm(pass.device, x, norm.view(), kLatentEpsilon, x, pass.stream()));
  return Ended(pass, StepPart::kNorm);
}

}  // namespace

Status RunProject(const Pass& pass, int64_t index) {
  const DecoderLayer& layer = pass.layer(index);
  const ArenaScope scope(pass.arena);
  const StepValues& values = pass.values;
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView x,
                          pass.arena.Take(pass.products.activations, values.hidden.shape()));
  MARLIN_RETURN_IF_ERROR(NormalizeHidden(pass, layer.input_norm, x));
  MARLIN_RETURN_IF_ERROR(
      Apply(pass.device, layer.attention.qkv, x, pass.products, values.projected));
  return Ended(pass, StepPart::kQkv);
}

Status RunLatentProject(const Pass& pass, int64_t index) {
  const ArenaScope scope(pass.arena);
  const StepValues& values = pass.values;
  const LatentAttentionLayer& layer = pass.layer(index).latent;
  const auto apply = [&](const Projection& projection, const TensorView& x,
                         const MutableTensorView& out) -> Status {
    MARLIN_RETURN_IF_ERROR(Apply(pass.device, projection, x, pass.products, out));
    return Ended(pass, StepPart::kQkv);
  };
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView x,
                          pass.arena.Take(pass.products.activations, values.hidden.shape()));
  MARLIN_RETURN_IF_ERROR(NormalizeHidden(pass, pass.layer(index).input_norm, x));
  TensorView query;
  if (!layer.q.empty()) {
    MARLIN_RETURN_IF_ERROR(apply(layer.q, x, values.projected));
  } else {
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView low,
                            pass.arena.Take(DType::kF32, {pass.rows(), layer.q_a.out}));
    query = low;
    MARLIN_RETURN_IF_ERROR(apply(layer.q_a, x, low));
    MARLIN_RETURN_IF_ERROR(NormalizeLatent(pass, layer.q_a_norm, low));
    MARLIN_RETURN_IF_ERROR(apply(layer.q_b, low, values.projected));
  }
  MARLIN_RETURN_IF_ERROR(apply(layer.kv_a, x, values.latent));
  const MutableTensorView latent(values.latent.data(), DType::kF32,
                                 {pass.rows(), pass.decoder.config.shape.kv_rank},
                                 {values.latent.stride(0), 1});
  MARLIN_RETURN_IF_ERROR(NormalizeLatent(pass, layer.kv_a_norm, latent));
  if (pass.inputs == nullptr) return {};
  return pass.inputs->AddLatent(query.empty() ? nullptr : &query, latent);
}

Status RunAttention(const Pass& pass, int64_t index) {
  const DecoderConfig& config = pass.decoder.config;
  if (config.latent()) {
    const ExpandedPages& pages = pass.values.pages[pass.pool.GroupOf(index)].expanded;
    return pages.pages.empty() ? AttendToLatents(pass, index) : AttendToHeads(pass, index, pages);
  }
  const Dimensions& shape = config.shape;
  const AttentionLayer& layer = pass.layer(index).attention;
  const MutableTensorView& qkv = pass.values.projected;
  const int64_t first_key = shape.heads * shape.head_dim;
  const int64_t first_value = first_key + shape.kv_heads * shape.head_dim;
  const MutableTensorView q = Heads(qkv, 0, shape.heads, shape.head_dim);
  const MutableTensorView k = Heads(qkv, first_key, shape.kv_heads, shape.head_dim);
  const MutableTensorView v = Heads(qkv, first_value, shape.kv_heads, shape.head_dim);
  const HeadNorms norms{layer.q_norm.view(), layer.k_norm.view(), config.epsilon};
  MARLIN_RETURN_IF_ERROR(RotateAndAppend(pass.device, {q, k, v}, norms, RotaryOf(pass),
                                         RowsOf(pass, index), CacheOf(pass, index), pass.stream()));
  MARLIN_RETURN_IF_ERROR(Ended(pass, StepPart::kRotateAppend));
  const MutableTensorView& mixed = pass.values.mixed;
  const MutableTensorView out(mixed.data(), mixed.dtype(),
                              {mixed.dim(0), shape.heads, shape.head_dim});
  return Attend(pass, {q, RowsOf(pass, index), CacheOf(pass, index), out,
                       OptionsOf(pass, index, layer.sinks.view())});
}

}  // namespace marlin
