#include "base/macros.h"
#include "marlin/decoder.h"
#include "model/forward.h"

namespace marlin {
namespace {

/// Heads that lie in columns [first, first + heads * dim) of rows.
MutableTensorView Heads(const MutableTensorView& rows, int64_t first, int64_t heads, int64_t dim) {
  return {
      rows.As<float>() + first, DType::kF32, {rows.dim(0), heads, dim}, {rows.stride(0), dim, 1}};
}

/// Appends keys and values to the cache and attends: out [rows, heads, value_dim].
Status Attend(const Pass& pass, int64_t layer, const MutableTensorView& queries,
              const MutableTensorView& keys, const MutableTensorView& values,
              const TensorView& sinks, const MutableTensorView& out) {
  const DecoderConfig& config = pass.decoder.config;
  const PassPages& pages = pass.pages[pass.pool.GroupOf(layer)];
  const SequenceRows rows{pass.positions, pass.first_rows, pages.block_tables};
  const PagedCache cache = pass.pool.CacheOf(layer, pages.slabs);
  MARLIN_RETURN_IF_ERROR(AppendToCache(pass.device, keys, values, rows, cache));
  AttentionOptions options;
  options.scale = config.score_scale;
  options.window = config.windows[static_cast<size_t>(layer)];
  options.sinks = sinks;
  options.accuracy = pass.products.accuracy;
  return PagedAttention(pass.device, queries, rows, cache, out, options);
}

Status Turn(const Pass& pass, const MutableTensorView& heads) {
  const DecoderConfig& config = pass.decoder.config;
  return ApplyRotary(pass.device,
                     {pass.decoder.inverse_frequencies.view(), config.rotary.attention_factor,
                      config.interleaved_rotary},
                     pass.positions, heads);
}

}  // namespace

Status RunAttention(const Pass& pass, int64_t layer, const TensorView& x,
                    const MutableTensorView& out) {
  const DecoderConfig& config = pass.decoder.config;
  const Dimensions& shape = config.shape;
  const AttentionLayer& weights = pass.decoder.layers[static_cast<size_t>(layer)].attention;
  const int64_t rows = pass.rows();
  const int64_t q_width = shape.heads * shape.head_dim;
  const int64_t kv_width = shape.kv_heads * shape.head_dim;
  const ArenaScope scope(pass.arena);
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView qkv,
                          pass.arena.Take(DType::kF32, {rows, q_width + 2 * kv_width}));
  MARLIN_RETURN_IF_ERROR(Apply(pass.device, weights.qkv, x, pass.products, qkv));
  const MutableTensorView q = Heads(qkv, 0, shape.heads, shape.head_dim);
  const MutableTensorView k = Heads(qkv, q_width, shape.kv_heads, shape.head_dim);
  const MutableTensorView v = Heads(qkv, q_width + kv_width, shape.kv_heads, shape.head_dim);
  if (!weights.q_norm.empty()) {
    MARLIN_RETURN_IF_ERROR(RmsNorm(pass.device, q, weights.q_norm.view(), config.epsilon, q));
    MARLIN_RETURN_IF_ERROR(RmsNorm(pass.device, k, weights.k_norm.view(), config.epsilon, k));
  }
  MARLIN_RETURN_IF_ERROR(Turn(pass, q));
  MARLIN_RETURN_IF_ERROR(Turn(pass, k));
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView mixed,
                          pass.arena.Take(DType::kF32, {rows, q_width}));
  MARLIN_RETURN_IF_ERROR(Attend(pass, layer, q, k, v, weights.sinks.view(),
                                Heads(mixed, 0, shape.heads, shape.head_dim)));
  return Apply(pass.device, weights.out, mixed, pass.products, out);
}

namespace {

/// Queries of the latent attention, [rows, heads * key_dim].
Status LatentQueries(const Pass& pass, const LatentAttentionLayer& weights, const TensorView& x,
                     const MutableTensorView& q) {
  if (!weights.q.empty()) return Apply(pass.device, weights.q, x, pass.products, q);
  const ArenaScope scope(pass.arena);
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView low,
                          pass.arena.Take(DType::kF32, {pass.rows(), weights.q_a.out}));
  MARLIN_RETURN_IF_ERROR(Apply(pass.device, weights.q_a, x, pass.products, low));
  MARLIN_RETURN_IF_ERROR(RmsNorm(pass.device, low, weights.q_a_norm.view(), kLatentEpsilon, low));
  return Apply(pass.device, weights.q_b, low, pass.products, q);
}

}  // namespace

Status RunLatentAttention(const Pass& pass, int64_t layer, const TensorView& x,
                          const MutableTensorView& out) {
  const DecoderConfig& config = pass.decoder.config;
  const Dimensions& shape = config.shape;
  const LatentAttentionLayer& weights = pass.decoder.layers[static_cast<size_t>(layer)].latent;
  const int64_t rows = pass.rows();
  const int64_t key_dim = config.key_dim();
  const int64_t pair_width = shape.nope_dim + shape.v_dim;
  const ArenaScope scope(pass.arena);
  const auto take = [&](int64_t width) { return pass.arena.Take(DType::kF32, {rows, width}); };
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView q, take(shape.heads * key_dim));
  MARLIN_RETURN_IF_ERROR(LatentQueries(pass, weights, x, q));
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView low, take(weights.kv_a.out));
  MARLIN_RETURN_IF_ERROR(Apply(pass.device, weights.kv_a, x, pass.products, low));
  const MutableTensorView latent(low.data(), DType::kF32, {rows, shape.kv_rank},
                                 {low.stride(0), 1});
  MARLIN_RETURN_IF_ERROR(
      RmsNorm(pass.device, latent, weights.kv_a_norm.view(), kLatentEpsilon, latent));
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView pairs, take(shape.heads * pair_width));
  MARLIN_RETURN_IF_ERROR(Apply(pass.device, weights.kv_b, latent, pass.products, pairs));

  // The turned part of a head follows its unturned one; all heads share the turned part of a key.
  const MutableTensorView turned_k = Heads(low, shape.kv_rank, 1, shape.rope_dim);
  MARLIN_RETURN_IF_ERROR(Turn(pass, turned_k));
  const auto part = [&](const MutableTensorView& of, int64_t first, int64_t width, int64_t stride) {
    return MutableTensorView(of.As<float>() + first, DType::kF32, {rows, shape.heads, width},
                             {of.stride(0), stride, 1});
  };
  MARLIN_RETURN_IF_ERROR(Turn(pass, part(q, shape.nope_dim, shape.rope_dim, key_dim)));
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView k, take(shape.heads * key_dim));
  MARLIN_RETURN_IF_ERROR(Convert(pass.device, part(pairs, 0, shape.nope_dim, pair_width),
                                 part(k, 0, shape.nope_dim, key_dim)));
  for (int64_t head = 0; head < shape.heads; ++head) {
    const MutableTensorView to = Heads(k, head * key_dim + shape.nope_dim, 1, shape.rope_dim);
    MARLIN_RETURN_IF_ERROR(Convert(pass.device, turned_k, to));
  }
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView mixed, take(shape.heads * shape.v_dim));
  MARLIN_RETURN_IF_ERROR(Attend(pass, layer, part(q, 0, key_dim, key_dim),
                                part(k, 0, key_dim, key_dim),
                                part(pairs, shape.nope_dim, shape.v_dim, pair_width), {},
                                Heads(mixed, 0, shape.heads, shape.v_dim)));
  return Apply(pass.device, weights.out, mixed, pass.products, out);
}

}  // namespace marlin
