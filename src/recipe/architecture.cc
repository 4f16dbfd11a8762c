// What config.json says, read as the model families' reference implementations name their tensors.
#include "recipe/architecture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/checked.h"
#include "base/macros.h"
#include "recipe/decoder_shape.h"
#include "recipe/model_config.h"
#include "recipe/stored_layout.h"

namespace marlin {
namespace {

/// Appends the tensors of a model in the order of its layers.
class TensorLister {
 public:
  TensorLister(const Family& family, const Dimensions& dimensions)
      : family_(family), d_(dimensions) {}

  std::vector<ModelTensor> Main() {
    Add("model.embed_tokens.weight", {d_.vocabulary, d_.hidden});
    for (layer_ = 0; layer_ < d_.layers; ++layer_) AddLayer();
    layer_ = -1;
    Add("model.norm.weight", {d_.hidden});
    if (!d_.tied) Add("lm_head.weight", {d_.vocabulary, d_.hidden});
    return std::move(tensors_);
  }

  std::vector<ModelTensor> Prediction() {
    tensors_.clear();
    for (layer_ = d_.layers; layer_ < d_.layers + d_.prediction_layers; ++layer_) {
      AddInLayer("embed_tokens.weight", {d_.vocabulary, d_.hidden});
      AddInLayer("enorm.weight", {d_.hidden});
      AddInLayer("hnorm.weight", {d_.hidden});
      AddInLayer("eh_proj.weight", {d_.hidden, 2 * d_.hidden});
      AddLayer();
      AddInLayer("shared_head.norm.weight", {d_.hidden});
      AddInLayer("shared_head.head.weight", {d_.vocabulary, d_.hidden});
    }
    return std::move(tensors_);
  }

 private:
  void Add(std::string name, Shape shape) {
    ModelTensor tensor;
    tensor.layer_class = ClassifyTensor(name);
    tensor.input_first = IsStoredInOut(family_.model_type, name);
    tensor.name = std::move(name);
    tensor.shape = shape;
    tensor.layer = layer_;
    tensor.routed = tensor.layer_class == LayerClass::kMoeExpert;
    tensors_.push_back(std::move(tensor));
  }
  void AddInLayer(std::string_view name, Shape shape) {
    Add(fmt::format("model.layers.{}.{}", layer_, name), shape);
  }
  void AddLinear(std::string_view name, int64_t out, int64_t in, bool bias) {
    AddInLayer(fmt::format("{}.weight", name), {out, in});
    if (bias) AddInLayer(fmt::format("{}.bias", name), {out});
  }

  void AddLayer() {
    AddInLayer("input_layernorm.weight", {d_.hidden});
    family_.attention == AttentionKind::kLatent ? AddLatentAttention() : AddAttention();
    AddInLayer("post_attention_layernorm.weight", {d_.hidden});
    if (family_.sandwich_norms) {
      AddInLayer("post_self_attn_layernorm.weight", {d_.hidden});
      AddInLayer("post_mlp_layernorm.weight", {d_.hidden});
    }
    IsSparse(family_, d_, layer_) ? AddExperts() : AddMlp("mlp", d_.intermediate);
  }

  void AddAttention() {
    const int64_t q = d_.heads * d_.head_dim;
    const int64_t kv = d_.kv_heads * d_.head_dim;
    if (family_.attention == AttentionKind::kFused) {
      AddLinear("self_attn.qkv_proj", q + 2 * kv, d_.hidden, d_.qkv_bias);
    } else {
      AddLinear("self_attn.q_proj", q, d_.hidden, d_.qkv_bias);
      AddLinear("self_attn.k_proj", kv, d_.hidden, d_.qkv_bias);
      AddLinear("self_attn.v_proj", kv, d_.hidden, d_.qkv_bias);
    }
    AddLinear("self_attn.o_proj", d_.hidden, q, d_.qkv_bias && family_.o_bias);
    if (d_.qk_norm) {
      AddInLayer("self_attn.q_norm.weight", {d_.head_dim});
      AddInLayer("self_attn.k_norm.weight", {d_.head_dim});
    }
    if (family_.experts == ExpertLayout::kStacked) AddInLayer("self_attn.sinks", {d_.heads});
  }

  void AddLatentAttention() {
    const int64_t qk_dim = d_.nope_dim + d_.rope_dim;
    if (d_.q_rank == 0) {
      AddLinear("self_attn.q_proj", d_.heads * qk_dim, d_.hidden, false);
    } else {
      AddLinear("self_attn.q_a_proj", d_.q_rank, d_.hidden, d_.qkv_bias);
      AddInLayer("self_attn.q_a_layernorm.weight", {d_.q_rank});
      AddLinear("self_attn.q_b_proj", d_.heads * qk_dim, d_.q_rank, false);
    }
    AddLinear("self_attn.kv_a_proj_with_mqa", d_.kv_rank + d_.rope_dim, d_.hidden, d_.qkv_bias);
    AddInLayer("self_attn.kv_a_layernorm.weight", {d_.kv_rank});
    AddLinear("self_attn.kv_b_proj", d_.heads * (d_.nope_dim + d_.v_dim), d_.kv_rank, false);
    AddLinear("self_attn.o_proj", d_.hidden, d_.heads * d_.v_dim, d_.qkv_bias);
  }

  void AddMlp(const std::string& prefix, int64_t width) {
    if (family_.fused_gate_up) {
      AddLinear(prefix + ".gate_up_proj", 2 * width, d_.hidden, d_.mlp_bias);
    } else {
      AddLinear(prefix + ".gate_proj", width, d_.hidden, d_.mlp_bias);
      AddLinear(prefix + ".up_proj", width, d_.hidden, d_.mlp_bias);
    }
    AddLinear(prefix + ".down_proj", d_.hidden, width, d_.mlp_bias);
  }

  void AddExperts() {
    if (family_.experts == ExpertLayout::kStacked) return AddStackedExperts();
    const bool block_sparse = family_.experts == ExpertLayout::kBlockSparse;
    const std::string block = block_sparse ? "block_sparse_moe" : "mlp";
    AddLinear(block + ".gate", d_.experts, d_.hidden, false);
    if (family_.correction_bias) {
      AddInLayer(block + ".gate.e_score_correction_bias", {d_.experts});
    }
    for (int64_t e = 0; e < d_.experts; ++e) {
      const std::string expert = fmt::format("{}.experts.{}", block, e);
      AddLinear(expert + (block_sparse ? ".w1" : ".gate_proj"), d_.expert_width, d_.hidden, false);
      AddLinear(expert + (block_sparse ? ".w3" : ".up_proj"), d_.expert_width, d_.hidden, false);
      AddLinear(expert + (block_sparse ? ".w2" : ".down_proj"), d_.hidden, d_.expert_width, false);
    }
    if (family_.shared == SharedExperts::kGated) {
      AddMlp("mlp.shared_expert", d_.shared_width);
      AddInLayer("mlp.shared_expert_gate.weight", {1, d_.hidden});
    } else if (d_.shared_width > 0) {
      AddMlp("mlp.shared_experts", d_.shared_width);
    }
  }

  void AddStackedExperts() {
    AddLinear("mlp.router", d_.experts, d_.hidden, true);
    const int64_t e = d_.experts;
    const int64_t width = d_.expert_width;
    AddInLayer("mlp.experts.gate_up_proj", {e, d_.hidden, 2 * width});
    AddInLayer("mlp.experts.gate_up_proj_bias", {e, 2 * width});
    AddInLayer("mlp.experts.down_proj", {e, width, d_.hidden});
    AddInLayer("mlp.experts.down_proj_bias", {e, d_.hidden});
  }

  const Family& family_;
  const Dimensions& d_;
  int64_t layer_ = -1;
  std::vector<ModelTensor> tensors_;
};

Status CheckTotal(const std::vector<ModelTensor>& tensors) {
  Checked total(0);
  for (const ModelTensor& tensor : tensors) {
    Checked count(1);
    for (int i = 0; i < tensor.shape.rank(); ++i) count = count * Checked(tensor.shape[i]);
    total = total + count;
  }
  // Room for a factor that turns elements into bits.
  if ((total * Checked(64)).valid()) return Status();
  return Status(Code::kMalformedFile, "config.json: the number of parameters overflows");
}

}  // namespace

Result<ModelArchitecture> DescribeModel(std::string_view config_json) {
  MARLIN_ASSIGN_OR_RETURN(ModelConfig config, ModelConfig::Parse(config_json));
  const std::string model_type = config.String("model_type");
  MARLIN_RETURN_IF_ERROR(config.status());
  MARLIN_ASSIGN_OR_RETURN(const Family* family, FindFamily(model_type));
  MARLIN_ASSIGN_OR_RETURN(const Dimensions d, ReadDimensions(*family, config));
  ModelArchitecture model;
  model.model_type = model_type;
  model.hidden_size = d.hidden;
  model.layer_count = d.layers;
  model.vocabulary_size = d.vocabulary;
  model.expert_count = d.experts;
  model.experts_per_token = d.top_k;
  model.tied_embeddings = d.tied;
  model.kv_cache_elements =
      d.layers * (family->attention == AttentionKind::kLatent ? d.kv_rank + d.rope_dim
                                                              : 2 * d.kv_heads * d.head_dim);
  TensorLister lister(*family, d);
  model.tensors = lister.Main();
  model.prediction_tensors = lister.Prediction();
  MARLIN_RETURN_IF_ERROR(CheckTotal(model.tensors));
  MARLIN_RETURN_IF_ERROR(CheckTotal(model.prediction_tensors));
  return model;
}

int64_t ParameterCount(const std::vector<ModelTensor>& tensors) {
  int64_t count = 0;
  for (const ModelTensor& tensor : tensors) count += tensor.shape.ElementCount();
  return count;
}

int64_t ActiveParameterCount(const ModelArchitecture& model) {
  int64_t routed = 0;
  for (const ModelTensor& tensor : model.tensors) {
    if (tensor.routed) routed += tensor.shape.ElementCount();
  }
  const int64_t total = ParameterCount(model.tensors);
  if (model.expert_count == 0) return total;
  // Every expert of a model has the same size, so the division is exact.
  return total - routed + routed / model.expert_count * model.experts_per_token;
}

}  // namespace marlin
