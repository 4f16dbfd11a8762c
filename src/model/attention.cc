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

Status Rotate(const Pass& pass, const AttentionStep& step, const MutableTensorView& heads) {
  return ApplyRotary(pass.device, step.rotary, pass.values.positions, heads);
}

/// Appends keys and values to the cache and attends.
Status Attend(const Pass& pass, const AttentionStep& step, const MutableTensorView& queries,
              const MutableTensorView& keys, const MutableTensorView& values) {
  const StepPages& pages = pass.values.pages[step.cache_group];
  const SequenceRows rows{pass.values.positions, pass.values.first_rows, pages.block_tables};
  PagedCache cache = step.cache;
  cache.slabs = pages.slabs;
  MARLIN_RETURN_IF_ERROR(AppendToCache(pass.device, keys, values, rows, cache));
  return PagedAttention(pass.device, queries, rows, cache,
                        Heads(pass.values.mixed, 0, step.heads, step.value_dim), step.options);
}

/// MLA: a head's key is its own part, then the part with RoPE that all heads share.
Status RunLatentAttention(const Pass& pass, const AttentionStep& step) {
  const StepValues& values = pass.values;
  const int64_t rows = pass.rows();
  const int64_t own_dim = step.key_dim - step.rope_dim;
  const int64_t pair_width = own_dim + step.value_dim;
  const auto part = [&](const MutableTensorView& of, int64_t first, int64_t width, int64_t stride) {
    return MutableTensorView(of.As<float>() + first, DType::kF32, {rows, step.heads, width},
                             {of.stride(0), stride, 1});
  };
  const int64_t rank = values.latent.dim(1) - step.rope_dim;
  const MutableTensorView shared = Heads(values.latent, rank, 1, step.rope_dim);
  MARLIN_RETURN_IF_ERROR(Rotate(pass, step, shared));
  MARLIN_RETURN_IF_ERROR(
      Rotate(pass, step, part(values.projected, own_dim, step.rope_dim, step.key_dim)));
  const ArenaScope scope(pass.arena);
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView k,
                          pass.arena.Take(DType::kF32, {rows, step.heads * step.key_dim}));
  MARLIN_RETURN_IF_ERROR(Convert(pass.device, part(values.expanded, 0, own_dim, pair_width),
                                 part(k, 0, own_dim, step.key_dim)));
  for (int64_t head = 0; head < step.heads; ++head) {
    const MutableTensorView to = Heads(k, head * step.key_dim + own_dim, 1, step.rope_dim);
    MARLIN_RETURN_IF_ERROR(Convert(pass.device, shared, to));
  }
  return Attend(pass, step, part(values.projected, 0, step.key_dim, step.key_dim),
                part(k, 0, step.key_dim, step.key_dim),
                part(values.expanded, own_dim, step.value_dim, pair_width));
}

}  // namespace

Status RunProject(const Pass& pass, const ProjectStep& step) {
  const ArenaScope scope(pass.arena);
  const StepValues& values = pass.values;
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView x,
                          pass.arena.Take(DType::kF32, values.hidden.shape()));
  MARLIN_RETURN_IF_ERROR(Normalize(pass, step.norm, values.hidden, x));
  return Apply(pass.device, pass.layer(step.layer).attention.qkv, x, pass.products,
               values.projected);
}

Status RunLatentProject(const Pass& pass, const LatentProjectStep& step) {
  const ArenaScope scope(pass.arena);
  const StepValues& values = pass.values;
  const LatentAttentionLayer& layer = pass.layer(step.layer).latent;
  const auto apply = [&](const Projection& projection, const TensorView& x,
                         const MutableTensorView& out) {
    return Apply(pass.device, projection, x, pass.products, out);
  };
  MARLIN_ASSIGN_OR_RETURN(const MutableTensorView x,
                          pass.arena.Take(DType::kF32, values.hidden.shape()));
  MARLIN_RETURN_IF_ERROR(Normalize(pass, step.norm, values.hidden, x));
  if (!layer.q.empty()) {
    MARLIN_RETURN_IF_ERROR(apply(layer.q, x, values.projected));
  } else {
    MARLIN_ASSIGN_OR_RETURN(const MutableTensorView low,
                            pass.arena.Take(DType::kF32, {pass.rows(), layer.q_a.out}));
    MARLIN_RETURN_IF_ERROR(apply(layer.q_a, x, low));
    MARLIN_RETURN_IF_ERROR(Normalize(pass, step.q_norm, low, low));
    MARLIN_RETURN_IF_ERROR(apply(layer.q_b, low, values.projected));
  }
  MARLIN_RETURN_IF_ERROR(apply(layer.kv_a, x, values.latent));
  const MutableTensorView latent(values.latent.data(), DType::kF32, {pass.rows(), layer.kv_b.in},
                                 {values.latent.stride(0), 1});
  MARLIN_RETURN_IF_ERROR(Normalize(pass, step.kv_norm, latent, latent));
  return apply(layer.kv_b, latent, values.expanded);
}

Status RunAttention(const Pass& pass, const AttentionStep& step) {
  if (step.rope_dim > 0) return RunLatentAttention(pass, step);
  const MutableTensorView& qkv = pass.values.projected;
  const int64_t first_key = step.heads * step.key_dim;
  const int64_t first_value = first_key + step.kv_heads * step.key_dim;
  const MutableTensorView q = Heads(qkv, 0, step.heads, step.key_dim);
  const MutableTensorView k = Heads(qkv, first_key, step.kv_heads, step.key_dim);
  const MutableTensorView v = Heads(qkv, first_value, step.kv_heads, step.value_dim);
  if (!step.q_norm.weight.empty()) {
    MARLIN_RETURN_IF_ERROR(Normalize(pass, step.q_norm, q, q));
    MARLIN_RETURN_IF_ERROR(Normalize(pass, step.k_norm, k, k));
  }
  MARLIN_RETURN_IF_ERROR(Rotate(pass, step, q));
  MARLIN_RETURN_IF_ERROR(Rotate(pass, step, k));
  return Attend(pass, step, q, k, v);
}

}  // namespace marlin
