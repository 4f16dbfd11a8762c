#include <fmt/core.h>

#include <algorithm>
#include <initializer_list>

#include "base/checked.h"
#include "base/macros.h"
#include "marlin/decoder.h"
#include "ops/decoder/decoder_checks.h"
#include "ops/decoder/expand_latents.h"
#include "ops/device/checks.h"
#include "ops/device/device.h"
#include "plan/step/decoder_calls.h"

namespace marlin {
namespace {

/// Bytes of a slab; -1 if they overflow.
int64_t SlabBytes(const PagedCache& cache) {
  const Checked bytes =
      Checked(cache.slab_pages) * Checked(cache.page_stride) * Checked(DTypeBytes(cache.type));
  return bytes.Take().value_or(-1);
}

Status CheckCache(const Device& device, const PagedCache& cache) {
  const DecoderBackend* const decoder = Internals::Impl(device).decoder();
  if (decoder == nullptr) return DecoderOf(device).status();
  const int64_t unit = decoder->cache_page_tokens();
  if (!IsFloat(cache.type) && cache.type != DType::kF8E4M3) {
    return Invalid(
        fmt::format("cache: expected f32, bf16, f16 or f8_e4m3, got {}", DTypeName(cache.type)));
  }
  if (cache.page_tokens < 1 || cache.page_tokens % unit != 0) {
    return Invalid(
        fmt::format("page_tokens: expected a multiple of {}, got {}", unit, cache.page_tokens));
  }
  if (cache.kv_heads < 1 || cache.key_dim < 1 || cache.value_dim < 0) {
    return Invalid(fmt::format("cache: {} heads of {} and {} features", cache.kv_heads,
                               cache.key_dim, cache.value_dim));
  }
  if (cache.values_in_keys && cache.value_dim > cache.key_dim) {
    return Invalid(fmt::format("value_dim: expected at most the {} features of the keys, got {}",
                               cache.key_dim, cache.value_dim));
  }
  const int64_t features = cache.key_dim + (cache.values_in_keys ? 0 : cache.value_dim);
  const Checked page = Checked(cache.kv_heads) * Checked(cache.page_tokens) * Checked(features);
  const int64_t elements = page.Take().value_or(INT64_MAX);
  if (cache.slab_pages < 1 || cache.first_element < 0 || SlabBytes(cache) < 0 ||
      elements > cache.page_stride || cache.first_element > cache.page_stride - elements) {
    return Invalid(fmt::format("cache: {} elements from {} on do not fit in {} pages of {}",
                               elements, cache.first_element, cache.slab_pages, cache.page_stride));
  }
  return {};
}

Status CheckRows(const SequenceRows& rows, int64_t count) {
  MARLIN_RETURN_IF_ERROR(CheckRank("first_rows", rows.first_rows, 1));
  MARLIN_RETURN_IF_ERROR(CheckRank("block_tables", rows.block_tables, 2));
  const int64_t sequences = rows.first_rows.dim(0) - 1;
  if (sequences < 0 || (sequences == 0 && count > 0)) {
    return Invalid(fmt::format("first_rows: {} sequences have no {} rows", sequences, count));
  }
  MARLIN_RETURN_IF_ERROR(CheckInt32("positions", rows.positions, {count}));
  MARLIN_RETURN_IF_ERROR(CheckInt32("first_rows", rows.first_rows, {sequences + 1}));
  return CheckInt32("block_tables", rows.block_tables, {sequences, rows.block_tables.dim(1)});
}

/// Whether an output overlaps pages of a cache.
bool OverlapsPages(const ByteRange& written, const PagedCache& cache) {
  const int64_t bytes = SlabBytes(cache);
  return std::ranges::any_of(cache.slabs, [&](const void* slab) {
    return slab != nullptr && written.Overlaps(ByteRange({slab, DType::kU8, {bytes}}));
  });
}

}  // namespace

Result<int64_t> CachePageTokens(const Device& device) {
  MARLIN_ASSIGN_OR_RETURN(const DecoderBackend* decoder, DecoderOf(device));
  return decoder->cache_page_tokens();
}

Status AppendToCache(const Device& device, const TensorView& keys, const TensorView& values,
                     const SequenceRows& rows, const PagedCache& cache, void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckCache(device, cache));
  MARLIN_RETURN_IF_ERROR(CheckRank("keys", keys, 3));
  const int64_t count = keys.dim(0);
  MARLIN_RETURN_IF_ERROR(CheckActivations("keys", keys, {count, cache.kv_heads, cache.key_dim}));
  if (cache.values_in_keys && !values.empty()) return Invalid("values: are in the keys");
  if (!cache.values_in_keys) {
    MARLIN_RETURN_IF_ERROR(
        CheckActivations("values", values, {count, cache.kv_heads, cache.value_dim}));
  }
  MARLIN_RETURN_IF_ERROR(CheckRows(rows, count));
  if (count == 0) return {};
  return RunOperation(device, AppendToCacheCall{keys, values, rows, cache}, stream);
}

namespace {

Status CheckHeadNorm(const char* name, const TensorView& norm, const MutableTensorView& heads) {
  return norm.empty() ? Status() : CheckRequiredVector(name, norm, heads.dim(2), false);
}

/// Checks that queries or keys, which are written, overlap nothing else of the call.
Status CheckWrittenHeads(const char* name, const MutableTensorView& heads, const HeadNorms& norms,
                         const RotaryEmbedding& rotary, const SequenceRows& rows) {
  if (!rotary.inverse_frequencies.empty()) {
    MARLIN_RETURN_IF_ERROR(CheckRotary(name, heads, rotary));
  }
  for (const TensorView& norm : {norms.queries, norms.keys}) {
    if (!norm.empty()) MARLIN_RETURN_IF_ERROR(CheckNoOverlap(name, heads, "norm", norm, false));
  }
  MARLIN_RETURN_IF_ERROR(CheckNoOverlapWithIndices(name, heads, "positions", rows.positions));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlapWithIndices(name, heads, "first_rows", rows.first_rows));
  return CheckNoOverlapWithIndices(name, heads, "block_tables", rows.block_tables);
}

/// Whether no row of one view of a projection reaches into the columns of the other: views of the
/// same rows with the same stride, side by side.
bool AreSideBySide(const TensorView& a, const TensorView& b) {
  if (a.dtype() != b.dtype() || a.dim(0) != b.dim(0) || a.stride(0) != b.stride(0)) return false;
  const auto columns = [](const TensorView& view) {
    return ((view.dim(1) - 1) * view.stride(1) + view.dim(2)) * DTypeBytes(view.dtype());
  };
  const auto first = reinterpret_cast<uintptr_t>(a.data());
  const auto second = reinterpret_cast<uintptr_t>(b.data());
  const uintptr_t low = std::min(first, second);
  const uintptr_t high = std::max(first, second);
  const int64_t of_low = first <= second ? columns(a) : columns(b);
  const int64_t of_high = first <= second ? columns(b) : columns(a);
  const auto apart = static_cast<int64_t>(high - low);
  return apart >= of_low && apart + of_high <= a.stride(0) * DTypeBytes(a.dtype());
}

Status CheckApart(const char* name, const TensorView& a, const char* other, const TensorView& b) {
  if (AreSideBySide(a, b)) return {};
  return CheckNoOverlap(name, a, other, b, false);
}

}  // namespace

Status RotateAndAppend(const Device& device, const AttentionHeads& heads, const HeadNorms& norms,
                       const RotaryEmbedding& rotary, const SequenceRows& rows,
                       const PagedCache& cache, void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckCache(device, cache));
  if (cache.values_in_keys) return Invalid("cache: has the values in its keys");
  MARLIN_RETURN_IF_ERROR(CheckRank("queries", heads.queries, 3));
  const int64_t count = heads.queries.dim(0);
  const int64_t query_heads = heads.queries.dim(1);
  MARLIN_RETURN_IF_ERROR(
      CheckActivations("queries", heads.queries, {count, query_heads, cache.key_dim}));
  MARLIN_RETURN_IF_ERROR(
      CheckActivations("keys", heads.keys, {count, cache.kv_heads, cache.key_dim}));
  MARLIN_RETURN_IF_ERROR(
      CheckActivations("values", heads.values, {count, cache.kv_heads, cache.value_dim}));
  MARLIN_RETURN_IF_ERROR(CheckRows(rows, count));
  MARLIN_RETURN_IF_ERROR(CheckHeadNorm("norms.queries", norms.queries, heads.queries));
  MARLIN_RETURN_IF_ERROR(CheckHeadNorm("norms.keys", norms.keys, heads.keys));
  MARLIN_RETURN_IF_ERROR(CheckEpsilon(norms.epsilon));
  if (count == 0) return {};
  MARLIN_RETURN_IF_ERROR(CheckWrittenHeads("queries", heads.queries, norms, rotary, rows));
  MARLIN_RETURN_IF_ERROR(CheckWrittenHeads("keys", heads.keys, norms, rotary, rows));
  MARLIN_RETURN_IF_ERROR(CheckApart("queries", heads.queries, "keys", heads.keys));
  MARLIN_RETURN_IF_ERROR(CheckApart("queries", heads.queries, "values", heads.values));
  MARLIN_RETURN_IF_ERROR(CheckApart("keys", heads.keys, "values", heads.values));
  return RunOperation(device, RotateAndAppendCall{heads, norms, rotary, rows, cache}, stream);
}

Status PagedAttention(const Device& device, const TensorView& queries, const SequenceRows& rows,
                      const PagedCache& cache, const MutableTensorView& out,
                      const AttentionOptions& options, void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckCache(device, cache));
  MARLIN_RETURN_IF_ERROR(CheckRank("queries", queries, 3));
  const int64_t count = queries.dim(0);
  const int64_t heads = queries.dim(1);
  MARLIN_RETURN_IF_ERROR(CheckActivations("queries", queries, {count, heads, cache.key_dim}));
  MARLIN_RETURN_IF_ERROR(CheckActivations("out", out, {count, heads, cache.value_dim}));
  if (heads % cache.kv_heads != 0) {
    return Invalid(fmt::format("queries: {} heads are not a multiple of the {} of keys", heads,
                               cache.kv_heads));
  }
  MARLIN_RETURN_IF_ERROR(CheckRows(rows, count));
  MARLIN_RETURN_IF_ERROR(CheckAttentionOptions(options, heads));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, "queries", queries, true));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlapWithIndices("out", out, "positions", rows.positions));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlapWithIndices("out", out, "first_rows", rows.first_rows));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlapWithIndices("out", out, "block_tables", rows.block_tables));
  if (OverlapsPages(ByteRange(out), cache)) return Invalid("out: overlaps the cache");
  if (out.ElementCount() == 0) return {};
  return RunOperation(device, PagedAttentionCall{queries, rows, cache, out, options}, stream);
}

namespace {

/// Checks that a cache can hold the heads of latents.
Status CheckHeadsOf(const PagedCache& latents, const TensorView& key_weights,
                    const TensorView& value_weights, int64_t count, const PagedCache& heads) {
  if (!latents.values_in_keys || latents.kv_heads != 1) {
    return Invalid("latents: expected one head with its values in its keys");
  }
  if (heads.values_in_keys) return Invalid("heads: have their values in their keys");
  if (heads.type == DType::kF8E4M3) return Invalid("heads: expected f32, bf16 or f16, got f8_e4m3");
  if (heads.page_tokens != latents.page_tokens) {
    return Invalid(fmt::format("heads: expected {} tokens a page, got {}", latents.page_tokens,
                               heads.page_tokens));
  }
  if (heads.slabs.size() != 1 || heads.slab_pages < count) {
    return Invalid(fmt::format("heads: expected a slab of {} pages, got {} of {}", count,
                               heads.slabs.size(), heads.slab_pages));
  }
  MARLIN_RETURN_IF_ERROR(CheckRank("key_weights", key_weights, 3));
  const int64_t rope = latents.key_dim - latents.value_dim;
  const int64_t nope = key_weights.dim(2);
  MARLIN_RETURN_IF_ERROR(
      CheckActivations("key_weights", key_weights, {heads.kv_heads, latents.value_dim, nope}));
  MARLIN_RETURN_IF_ERROR(CheckActivations("value_weights", value_weights,
                                          {heads.kv_heads, heads.value_dim, latents.value_dim}));
  if (heads.key_dim == nope + rope) return {};
  return Invalid(
      fmt::format("heads: expected keys of {} features, got {}", nope + rope, heads.key_dim));
}

struct NamedView {
  const char* name;
  TensorView view;
};

/// Checks that the memory of heads overlaps nothing else of the call.
Status CheckHeadsApart(const TensorView& heads, const PagedCache& latents,
                       std::initializer_list<NamedView> others) {
  const ByteRange written(heads);
  if (OverlapsPages(written, latents)) return Invalid("heads: overlap the latents");
  for (const NamedView& other : others) {
    if (written.Overlaps(ByteRange(other.view))) {
      return Invalid(fmt::format("heads: overlap the {}", other.name));
    }
  }
  return {};
}

}  // namespace

Status ExpandLatents(const Device& device, const PagedCache& latents, const TensorView& pages,
                     const TensorView& tokens, const TensorView& key_weights,
                     const TensorView& value_weights, const PagedCache& heads, void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckCache(device, latents));
  MARLIN_RETURN_IF_ERROR(CheckCache(device, heads));
  MARLIN_RETURN_IF_ERROR(CheckRank("pages", pages, 1));
  const int64_t count = pages.dim(0);
  MARLIN_RETURN_IF_ERROR(CheckInt32("pages", pages, {count}));
  MARLIN_RETURN_IF_ERROR(CheckInt32("tokens", tokens, {count}));
  MARLIN_RETURN_IF_ERROR(CheckHeadsOf(latents, key_weights, value_weights, count, heads));
  const TensorView written(heads.slabs[0], DType::kU8, {SlabBytes(heads)});
  MARLIN_RETURN_IF_ERROR(CheckData("heads", written));
  MARLIN_RETURN_IF_ERROR(CheckHeadsApart(written, latents,
                                         {{"pages", pages},
                                          {"tokens", tokens},
                                          {"weights", key_weights},
                                          {"weights", value_weights}}));
  if (count == 0) return {};
  return RunOperation(
      device, ExpandLatentsCall{latents, pages, tokens, key_weights, value_weights, heads}, stream);
}

}  // namespace marlin
