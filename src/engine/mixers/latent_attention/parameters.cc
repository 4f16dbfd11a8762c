// The parameters of latent attention in a config and a checkpoint, and their conversion.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/macros.h"
#include "engine/mixers/latent_attention/absorb.h"
#include "engine/mixers/latent_attention/latent_attention.h"

namespace marlin {
namespace {

constexpr std::string_view kFull = "full";
constexpr std::string_view kShared = "shared";

/// Whether each layer has an indexer: the words of indexer_types, or of index_topk_pattern, which
/// may be a string of their first letters; empty: neither is there.
std::vector<std::string> IndexerKinds(ModelConfig& config) {
  constexpr std::string_view kPattern = "index_topk_pattern";
  std::vector<std::string> kinds = config.StringsOrEmpty("indexer_types");
  if (!kinds.empty() || !config.Has(kPattern)) return kinds;
  if (config.IsList(kPattern)) return config.StringsOrEmpty(kPattern);
  for (const char letter : config.String(kPattern)) {
    kinds.emplace_back(letter == 'F' ? kFull : letter == 'S' ? kShared : "");
  }
  return kinds;
}

/// Reads which layers attend to the tokens that the indexer of an earlier layer selects.
void ReadUnindexedLayers(ModelConfig& config, Dimensions* sizes) {
  const std::vector<std::string> kinds = IndexerKinds(config);
  const int64_t every = std::max<int64_t>(config.CountOr("index_topk_freq", kMaxWidth, 1), 1);
  const int64_t offset = config.CountOr("index_skip_topk_offset", kMaxWidth, 2);
  if (!kinds.empty() && std::ssize(kinds) != sizes->layers) {
    config.Fail("indexer_types",
                fmt::format("{} entries for {} layers", kinds.size(), sizes->layers));
  }
  for (int64_t layer = 0; layer < sizes->layers && config.status().ok(); ++layer) {
    bool shared = std::max<int64_t>(layer - offset + 1, 0) % every != 0;
    if (!kinds.empty()) {
      const std::string& kind = kinds[static_cast<size_t>(layer)];
      shared = kind == kShared;
      if (!shared && kind != kFull) {
        config.Fail("indexer_types", fmt::format("entry {} is neither full nor shared", layer));
      }
    }
    if (shared) sizes->unindexed_layers.push_back(layer);
  }
}

/// The indexer of a layer: it has low-rank queries as attention does, and one key of a token.
void AddIndexer(const Dimensions& sizes, const LayerNames& names, MixerTensors* tensors) {
  if (sizes.index_dim == 0) return;
  tensors->unused_linears = {
      names.Linear("self_attn.indexer.wq_b", sizes.q_rank, sizes.index_heads * sizes.index_dim),
      names.Linear("self_attn.indexer.wk", sizes.hidden, sizes.index_dim),
      names.Linear("self_attn.indexer.weights_proj", sizes.hidden, sizes.index_heads)};
  tensors->unused_vectors = {names.Vector("self_attn.indexer.k_norm.weight", sizes.index_dim),
                             names.Vector("self_attn.indexer.k_norm.bias", sizes.index_dim)};
}

}  // namespace

void LatentAttention::ReadSizes(const Family& family, ModelConfig& config,
                                Dimensions* sizes) const {
  ReadHeads(family, config, sizes);
  sizes->q_rank = config.CountOr("q_lora_rank", kMaxWidth, 0);
  sizes->kv_rank = config.Size("kv_lora_rank", kMaxWidth);
  sizes->nope_dim = config.Size("qk_nope_head_dim", kMaxWidth);
  sizes->rope_dim = config.Size("qk_rope_head_dim", kMaxWidth);
  sizes->v_dim = config.Size("v_head_dim", kMaxWidth);
  if (!config.Knows("index_topk")) return;
  sizes->index_tokens = config.Size("index_topk", kMaxWidth);
  sizes->index_heads = config.Size("index_n_heads", kMaxHeads);
  sizes->index_dim = config.Size("index_head_dim", kMaxWidth);
  if (sizes->q_rank == 0) config.Fail("q_lora_rank", "an indexer needs one");
  ReadUnindexedLayers(config, sizes);
}

MixerTensors LatentAttention::Tensors(const Family& family, const Dimensions& sizes,
                                      const LayerNames& names) const {
  const int64_t q_out = sizes.heads * (sizes.nope_dim + sizes.rope_dim);
  MixerTensors tensors;
  tensors.projections.resize(kLatentProjections);
  tensors.vectors.resize(kLatentVectors);
  const auto set = [&](LatentProjection projection, LinearTensors linear, size_t input = 0) {
    tensors.projections[projection] = {{std::move(linear)}, input};
  };
  if (sizes.q_rank == 0) {
    set(kQ, names.Linear("self_attn.q_proj", sizes.hidden, q_out));
  } else {
    set(kQA, names.Linear("self_attn.q_a_proj", sizes.hidden, sizes.q_rank, sizes.qkv_bias));
    tensors.vectors[kQANorm] = names.Norm(family, "self_attn.q_a_layernorm", sizes.q_rank);
    set(kQB, names.Linear("self_attn.q_b_proj", sizes.q_rank, q_out), kQueryInput);
  }
  set(kKvA, names.Linear("self_attn.kv_a_proj_with_mqa", sizes.hidden,
                         sizes.kv_rank + sizes.rope_dim, sizes.qkv_bias));
  tensors.vectors[kKvANorm] = names.Norm(family, "self_attn.kv_a_layernorm", sizes.kv_rank);
  set(kKvB,
      names.Linear("self_attn.kv_b_proj", sizes.kv_rank,
                   sizes.heads * (sizes.nope_dim + sizes.v_dim)),
      kLatentInput);
  AddIndexer(sizes, names, &tensors);
  tensors.out =
      names.Linear("self_attn.o_proj", sizes.heads * sizes.v_dim, sizes.hidden, sizes.qkv_bias);
  return tensors;
}

std::vector<InputSource> LatentAttention::Sources(const Dimensions& sizes,
                                                  const MixerTensors& tensors) const {
  InputSource mixed;
  mixed.linear = tensors.projections[kKvB].layers.front();
  for (int64_t i = 0; i < tensors.out.in; ++i) {
    const int64_t head = i / sizes.v_dim;
    mixed.outputs.push_back(head * (sizes.nope_dim + sizes.v_dim) + sizes.nope_dim +
                            i % sizes.v_dim);
  }
  return {{tensors.vectors[kQANorm], {}, {}}, {tensors.vectors[kKvANorm], {}, {}}, mixed};
}

float LatentAttention::ScoreScale(const Dimensions& sizes, float rotary) const {
  float scale = 1.0F / std::sqrt(static_cast<float>(sizes.nope_dim + sizes.rope_dim));
  scale *= rotary;
  return scale;
}

Status LatentAttention::Convert(const Device& device, const Dimensions& sizes, bool exact,
                                MixerLayer* layer) const {
  Projection kv_b = std::exchange(layer->projections[kKvB], Projection());
  MARLIN_ASSIGN_OR_RETURN(AbsorbedProjection absorbed,
                          Absorb(device, kv_b, sizes, AbsorbedType(exact)));
  layer->converted = std::make_unique<const AbsorbedProjection>(std::move(absorbed));
  return {};
}

int64_t LatentAttention::ConvertedBytes(const Dimensions& sizes, bool exact) const {
  return AbsorbedBytes(sizes, AbsorbedType(exact));
}

}  // namespace marlin
