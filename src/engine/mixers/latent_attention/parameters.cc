// The parameters of latent attention in a config and a checkpoint, and their conversion.
#include <cmath>
#include <memory>
#include <utility>

#include "base/macros.h"
#include "engine/mixers/latent_attention/absorb.h"
#include "engine/mixers/latent_attention/latent_attention.h"

namespace marlin {

void LatentAttention::ReadSizes(const Family& family, ModelConfig& config,
                                Dimensions* sizes) const {
  ReadHeads(family, config, sizes);
  sizes->q_rank = config.CountOr("q_lora_rank", kMaxWidth, 0);
  sizes->kv_rank = config.Size("kv_lora_rank", kMaxWidth);
  sizes->nope_dim = config.Size("qk_nope_head_dim", kMaxWidth);
  sizes->rope_dim = config.Size("qk_rope_head_dim", kMaxWidth);
  sizes->v_dim = config.Size("v_head_dim", kMaxWidth);
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
