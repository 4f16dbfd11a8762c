#include "engine/mixers/paged_attention.h"

#include "base/macros.h"

namespace marlin {

MutableTensorView HeadsIn(const MutableTensorView& rows, int64_t first, int64_t heads,
                          int64_t dim) {
  return {
      rows.As<float>() + first, DType::kF32, {rows.dim(0), heads, dim}, {rows.stride(0), dim, 1}};
}

MutableTensorView MixedHeads(const Pass& pass, int64_t layer, int64_t heads, int64_t dim) {
  const MutableTensorView mixed = MixedOf(pass, layer);
  return {mixed.data(), mixed.dtype(), {mixed.dim(0), heads, dim}};
}

RotaryEmbedding RotaryOf(const Decoder& decoder, int64_t layer) {
  const DecoderConfig& config = decoder.config;
  const size_t rotary = config.layer(layer).rotary;
  if (rotary == kNoRotary) return {};
  return {decoder.inverse_frequencies[rotary].view(), config.rotaries[rotary].attention_factor,
          config.interleaved_rotary};
}

SequenceRows RowsOf(const Pass& pass, int64_t layer) {
  const StepPages& pages = pass.values.pages[pass.pool.GroupOf(layer)];
  return {pass.values.positions, pass.values.first_rows, pages.block_tables};
}

PagedCache CacheOf(const Pass& pass, int64_t layer) {
  return pass.pool.CacheOf(layer, pass.values.pages[pass.pool.GroupOf(layer)].slabs);
}

AttentionOptions AttentionOptionsOf(const Pass& pass, int64_t layer) {
  const LayerConfig& config = pass.decoder.config.layer(layer);
  AttentionOptions options;
  options.scale = config.score_scale;
  options.window = config.window;
  options.chunked = config.chunked;
  options.softcap = pass.decoder.config.score_softcap;
  options.accuracy = pass.products.accuracy;
  options.allow_bf16_activations = pass.products.allow_bf16_activations;
  options.determinism = pass.products.determinism;
  return options;
}

std::vector<DecoderOperation> PagedAttentionOperations() {
  using enum DecoderOperation;
  return {kRmsNorm,       kApplyRotary,     kConvert,        kHeadProduct,
          kAppendToCache, kRotateAndAppend, kPagedAttention, kScaleByPosition};
}

Status Attend(const Pass& pass, const PagedAttentionCall& call) {
  MARLIN_RETURN_IF_ERROR(PagedAttention(pass.device, call.queries, call.rows, call.cache, call.out,
                                        call.options, pass.stream()));
  return Ended(pass, StepPart::kAttention);
}

AttentionStep DescribeAttention(const DescribedLayer& layer) {
  const DecoderConfig& config = layer.decoder.config;
  AttentionStep step;
  step.layer = layer.index;
  step.heads = config.layer(layer.index).sizes.heads;
  step.cache_group = layer.pool.GroupOf(layer.index);
  step.cache = layer.pool.CacheOf(layer.index, {});
  step.kv_heads = step.cache.kv_heads;
  step.key_dim = step.cache.key_dim;
  step.value_dim = step.cache.value_dim;
  step.q_norm.epsilon = config.epsilon;
  step.k_norm.epsilon = config.epsilon;
  step.rotary = RotaryOf(layer.decoder, layer.index);
  step.query_scale = config.layer(layer.index).query_scale;
  step.options.scale = config.layer(layer.index).score_scale;
  step.options.window = config.layer(layer.index).window;
  step.options.chunked = config.layer(layer.index).chunked;
  step.options.softcap = config.score_softcap;
  step.options.accuracy = layer.products.accuracy;
  step.options.allow_bf16_activations = layer.products.allow_bf16_activations;
  return step;
}

}  // namespace marlin
