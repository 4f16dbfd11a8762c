#include "recipe/decoder_tensors.h"

#include <fmt/core.h>

namespace marlin {
namespace {

class LayerDescriber {
 public:
  LayerDescriber(const Family& family, const Dimensions& dimensions, int64_t layer,
                 const ExpertStyle& style)
      : family_(family), d_(dimensions), prefix_(LayerPrefix(layer)), style_(style) {}

  LayerTensors Describe(bool sparse) const {
    LayerTensors layer;
    layer.input_norm = Vector("input_layernorm.weight", d_.hidden);
    if (family_.attention == AttentionKind::kLatent) {
      layer.latent = LatentAttention();
    } else {
      layer.attention = Attention();
    }
    layer.mlp_norm = Vector("post_attention_layernorm.weight", d_.hidden);
    if (family_.sandwich_norms) {
      layer.attention_out_norm = Vector("post_self_attn_layernorm.weight", d_.hidden);
      layer.mlp_out_norm = Vector("post_mlp_layernorm.weight", d_.hidden);
    }
    if (sparse) {
      layer.experts = Experts();
    } else {
      layer.mlp = Mlp("mlp", d_.intermediate, kUsualProjections);
    }
    return layer;
  }

 private:
  LinearTensors Linear(std::string_view name, int64_t in, int64_t out, bool bias = false) const {
    return {prefix_ + std::string(name), in, out, bias};
  }
  VectorTensor Vector(std::string_view name, int64_t count) const {
    return {prefix_ + std::string(name), count};
  }

  AttentionTensors Attention() const {
    const int64_t q = d_.heads * d_.head_dim;
    const int64_t kv = d_.kv_heads * d_.head_dim;
    AttentionTensors attention;
    if (family_.attention == AttentionKind::kFused) {
      attention.qkv = {Linear("self_attn.qkv_proj", d_.hidden, q + 2 * kv, d_.qkv_bias)};
    } else {
      attention.qkv = {Linear("self_attn.q_proj", d_.hidden, q, d_.qkv_bias),
                       Linear("self_attn.k_proj", d_.hidden, kv, d_.qkv_bias),
                       Linear("self_attn.v_proj", d_.hidden, kv, d_.qkv_bias)};
    }
    attention.out = Linear("self_attn.o_proj", q, d_.hidden, d_.qkv_bias && family_.o_bias);
    if (d_.qk_norm) {
      attention.q_norm = Vector("self_attn.q_norm.weight", d_.head_dim);
      attention.k_norm = Vector("self_attn.k_norm.weight", d_.head_dim);
    }
    if (family_.attention_sinks) attention.sinks = Vector("self_attn.sinks", d_.heads);
    return attention;
  }

  LatentAttentionTensors LatentAttention() const {
    const int64_t q_out = d_.heads * (d_.nope_dim + d_.rope_dim);
    LatentAttentionTensors latent;
    if (d_.q_rank == 0) {
      latent.q = Linear("self_attn.q_proj", d_.hidden, q_out);
    } else {
      latent.q_a = Linear("self_attn.q_a_proj", d_.hidden, d_.q_rank, d_.qkv_bias);
      latent.q_a_norm = Vector("self_attn.q_a_layernorm.weight", d_.q_rank);
      latent.q_b = Linear("self_attn.q_b_proj", d_.q_rank, q_out);
    }
    latent.kv_a =
        Linear("self_attn.kv_a_proj_with_mqa", d_.hidden, d_.kv_rank + d_.rope_dim, d_.qkv_bias);
    latent.kv_a_norm = Vector("self_attn.kv_a_layernorm.weight", d_.kv_rank);
    latent.kv_b = Linear("self_attn.kv_b_proj", d_.kv_rank, d_.heads * (d_.nope_dim + d_.v_dim));
    latent.out = Linear("self_attn.o_proj", d_.heads * d_.v_dim, d_.hidden, d_.qkv_bias);
    return latent;
  }

  MlpTensors Mlp(const std::string& block, int64_t width, const ExpertProjections& names) const {
    const auto linear = [&](std::string_view name, int64_t in, int64_t out) {
      return Linear(fmt::format("{}.{}", block, name), in, out, d_.mlp_bias);
    };
    MlpTensors mlp;
    if (family_.fused_gate_up) {
      mlp.gate_up = {linear(kFusedProjections[0], d_.hidden, 2 * width)};
    } else {
      mlp.gate_up = {linear(names[0], d_.hidden, width), linear(names[1], d_.hidden, width)};
    }
    mlp.down = linear(names[2], width, d_.hidden);
    return mlp;
  }

  ExpertStack Stack(std::string_view name, int64_t in, int64_t out) const {
    ExpertStack stack{fmt::format("{}{}.experts.{}", prefix_, style_.block, name), in, out, {}};
    if (style_.biases) stack.bias_name = stack.name + "_bias";
    return stack;
  }

  ExpertsTensors Experts() const {
    const std::string block(style_.block);
    ExpertsTensors experts;
    experts.router = Linear(fmt::format("{}.{}", block, style_.router), d_.hidden, d_.experts,
                            style_.router_bias);
    if (family_.router == RouterRule::kSigmoid) {
      experts.correction_bias = Vector(block + ".gate.e_score_correction_bias", d_.experts);
    }
    if (style_.stacked) {
      experts.gate_up = Stack(kFusedProjections[0], d_.hidden, 2 * d_.expert_width);
      experts.down = Stack(kFusedProjections[1], d_.expert_width, d_.hidden);
    } else {
      for (int64_t e = 0; e < d_.experts; ++e) {
        experts.each.push_back(Mlp(fmt::format("{}.experts.{}", block, e), d_.expert_width,
                                   style_.short_names ? kShortProjections : kUsualProjections));
      }
    }
    if (d_.shared_width == 0) return experts;
    const bool gated = family_.shared == SharedExperts::kGated;
    experts.shared = Mlp(block + (gated ? ".shared_expert" : ".shared_experts"), d_.shared_width,
                         kUsualProjections);
    if (gated) experts.shared_gate = Linear(block + ".shared_expert_gate", d_.hidden, 1);
    return experts;
  }

  const Family& family_;
  const Dimensions& d_;
  std::string prefix_;
  const ExpertStyle& style_;
};

}  // namespace

std::string LayerPrefix(int64_t layer) { return fmt::format("model.layers.{}.", layer); }

bool IsPredictionTensor(const Dimensions& dimensions, std::string_view name) {
  for (int64_t i = 0; i < dimensions.prediction_layers; ++i) {
    if (name.starts_with(LayerPrefix(dimensions.layers + i))) return true;
  }
  return false;
}

LayerTensors DescribeLayer(const Family& family, const Dimensions& dimensions, int64_t layer,
                           const ExpertStyle& style) {
  return LayerDescriber(family, dimensions, layer, style)
      .Describe(IsSparse(family, dimensions, layer));
}

ExpertStyle FindExpertStyle(const Family& family, int64_t layer,
                            FunctionRef<bool(const std::string&)> has) {
  ExpertStyle style = family.experts == nullptr ? ExpertStyle() : *family.experts;
  const std::string prefix = LayerPrefix(layer);
  // Checkpoints of Mixtral rename the block, the matrices or both, or stack all experts.
  for (const std::string_view block : kExpertBlocks) {
    if (has(fmt::format("{}{}.{}.weight", prefix, block, style.router))) style.block = block;
  }
  const std::string experts = fmt::format("{}{}.experts.", prefix, style.block);
  style.stacked = has(experts + std::string(kFusedProjections[0]));
  style.short_names = has(fmt::format("{}0.{}.weight", experts, kShortProjections[0]));
  return style;
}

}  // namespace marlin
