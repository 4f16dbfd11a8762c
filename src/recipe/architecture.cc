// What config.json says, read as the model families' reference implementations name their tensors.
#include "recipe/architecture.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/checked.h"
#include "base/macros.h"
#include "recipe/model_config.h"
#include "recipe/stored_layout.h"

namespace marlin {
namespace {

// Far above every published model, low enough that a product of any three fits in an int64.
constexpr int64_t kMaxWidth = int64_t{1} << 20;
constexpr int64_t kMaxVocabulary = int64_t{1} << 24;
constexpr int64_t kMaxLayers = int64_t{1} << 12;
constexpr int64_t kMaxHeads = int64_t{1} << 12;
constexpr int64_t kMaxExperts = int64_t{1} << 14;
constexpr int64_t kMaxTensors = int64_t{1} << 20;

enum class Bias : uint8_t {
  kNone,
  kAlways,
  kByAttentionBias,  ///< The key attention_bias, false when absent.
  kByQkvBias,        ///< The key qkv_bias, true when absent.
};
enum class QkNorm : uint8_t { kNone, kAlways, kByUseQkNorm };
enum class Attention : uint8_t { kSplit, kFused, kLatent };
enum class Experts : uint8_t {
  kNone,
  kMlp,          ///< mlp.experts.N.{gate,up,down}_proj beside mlp.gate
  kBlockSparse,  ///< block_sparse_moe.experts.N.{w1,w3,w2} beside block_sparse_moe.gate
  kStacked,      ///< gpt_oss: mlp.experts.{gate_up_proj,down_proj} [E, in, out] beside mlp.router
};
enum class Shared : uint8_t { kNone, kGated, kPlain };
enum class Sparse : uint8_t { kAllLayers, kByStep, kAfterFirst };

/// What is fixed for a model_type.
struct Family {
  std::string_view model_type;
  Attention attention;
  Bias qkv_bias;
  bool o_bias;  ///< The output projection follows qkv_bias.
  QkNorm qk_norm;
  bool fused_gate_up;
  bool sandwich_norms;  ///< glm4: norms after attention and MLP too.
  Experts experts;
  Sparse sparse;
  Shared shared;
  bool correction_bias;
  int64_t default_head_dim;  ///< 0: hidden_size / num_attention_heads.
};

constexpr Family kFamilies[] = {
    {"llama", Attention::kSplit, Bias::kByAttentionBias, true, QkNorm::kNone, false, false,
     Experts::kNone, Sparse::kAllLayers, Shared::kNone, false, 0},
    {"mistral", Attention::kSplit, Bias::kNone, false, QkNorm::kNone, false, false, Experts::kNone,
     Sparse::kAllLayers, Shared::kNone, false, 0},
    {"mixtral", Attention::kSplit, Bias::kNone, false, QkNorm::kNone, false, false,
     Experts::kBlockSparse, Sparse::kAllLayers, Shared::kNone, false, 0},
    {"phi3", Attention::kFused, Bias::kNone, false, QkNorm::kNone, true, false, Experts::kNone,
     Sparse::kAllLayers, Shared::kNone, false, 0},
    {"qwen2", Attention::kSplit, Bias::kAlways, false, QkNorm::kNone, false, false, Experts::kNone,
     Sparse::kAllLayers, Shared::kNone, false, 0},
    {"qwen3", Attention::kSplit, Bias::kByAttentionBias, true, QkNorm::kAlways, false, false,
     Experts::kNone, Sparse::kAllLayers, Shared::kNone, false, 128},
    {"qwen2_moe", Attention::kSplit, Bias::kByQkvBias, false, QkNorm::kNone, false, false,
     Experts::kMlp, Sparse::kByStep, Shared::kGated, false, 0},
    {"qwen3_moe", Attention::kSplit, Bias::kByAttentionBias, true, QkNorm::kAlways, false, false,
     Experts::kMlp, Sparse::kByStep, Shared::kNone, false, 0},
    {"glm4", Attention::kSplit, Bias::kByAttentionBias, false, QkNorm::kNone, true, true,
     Experts::kNone, Sparse::kAllLayers, Shared::kNone, false, 128},
    {"glm4_moe", Attention::kSplit, Bias::kByAttentionBias, false, QkNorm::kByUseQkNorm, false,
     false, Experts::kMlp, Sparse::kAfterFirst, Shared::kPlain, true, 0},
    {"glm4_moe_lite", Attention::kLatent, Bias::kByAttentionBias, true, QkNorm::kNone, false, false,
     Experts::kMlp, Sparse::kAfterFirst, Shared::kPlain, true, 0},
    {"deepseek_v2", Attention::kLatent, Bias::kByAttentionBias, true, QkNorm::kNone, false, false,
     Experts::kMlp, Sparse::kAfterFirst, Shared::kPlain, false, 0},
    {"deepseek_v3", Attention::kLatent, Bias::kByAttentionBias, true, QkNorm::kNone, false, false,
     Experts::kMlp, Sparse::kAfterFirst, Shared::kPlain, true, 0},
    {"gpt_oss", Attention::kSplit, Bias::kAlways, true, QkNorm::kNone, false, false,
     Experts::kStacked, Sparse::kAllLayers, Shared::kNone, false, 64},
};

Result<const Family*> FindFamily(const std::string& model_type) {
  std::string known;
  for (const Family& family : kFamilies) {
    if (family.model_type == model_type) return &family;
    known += known.empty() ? "" : ", ";
    known += family.model_type;
  }
  return Status(
      Code::kUnsupported,
      fmt::format("config.json: model_type '{}' is not known; known: {}", model_type, known));
}

/// Everything that the tensors' shapes depend on.
struct Dimensions {
  int64_t hidden = 0;
  int64_t layers = 0;
  int64_t vocabulary = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t intermediate = 0;
  int64_t expert_width = 0;
  int64_t shared_width = 0;
  int64_t experts = 0;
  int64_t top_k = 0;
  int64_t first_dense = 0;
  int64_t sparse_step = 1;
  int64_t prediction_layers = 0;
  std::vector<int64_t> dense_layers;
  // Latent attention; q_rank 0 means one q_proj.
  int64_t q_rank = 0;
  int64_t kv_rank = 0;
  int64_t nope_dim = 0;
  int64_t rope_dim = 0;
  int64_t v_dim = 0;
  bool qkv_bias = false;
  bool qk_norm = false;
  bool mlp_bias = false;
  bool tied = false;
};

void ReadAttention(const Family& family, ModelConfig& config, Dimensions* d) {
  d->heads = config.Size("num_attention_heads", kMaxHeads);
  d->kv_heads = config.SizeOr("num_key_value_heads", kMaxHeads, d->heads);
  switch (family.qkv_bias) {
    case Bias::kNone:
      break;
    case Bias::kAlways:
      d->qkv_bias = true;
      break;
    case Bias::kByAttentionBias:
      d->qkv_bias = config.Bool("attention_bias", false);
      break;
    case Bias::kByQkvBias:
      d->qkv_bias = config.Bool("qkv_bias", true);
      break;
  }
  d->qk_norm = family.qk_norm == QkNorm::kAlways ||
               (family.qk_norm == QkNorm::kByUseQkNorm && config.Bool("use_qk_norm", false));
  if (family.attention == Attention::kLatent) {
    d->q_rank = config.CountOr("q_lora_rank", kMaxWidth, 0);
    d->kv_rank = config.Size("kv_lora_rank", kMaxWidth);
    d->nope_dim = config.Size("qk_nope_head_dim", kMaxWidth);
    d->rope_dim = config.Size("qk_rope_head_dim", kMaxWidth);
    d->v_dim = config.Size("v_head_dim", kMaxWidth);
    return;
  }
  if (config.Has("head_dim") || family.default_head_dim != 0) {
    d->head_dim = config.SizeOr("head_dim", kMaxWidth, family.default_head_dim);
  } else if (d->hidden % d->heads == 0) {
    d->head_dim = d->hidden / d->heads;
  } else {
    config.Fail("num_attention_heads",
                fmt::format("{} heads do not divide hidden_size {}", d->heads, d->hidden));
  }
  if (d->heads % d->kv_heads != 0) {
    config.Fail("num_key_value_heads",
                fmt::format("{} do not divide num_attention_heads {}", d->kv_heads, d->heads));
  }
}

void ReadExperts(const Family& family, ModelConfig& config, Dimensions* d) {
  if (family.experts == Experts::kNone) return;
  constexpr std::array<std::string_view, 3> kCounts = {"num_experts", "num_local_experts",
                                                       "n_routed_experts"};
  constexpr std::array<std::string_view, 2> kTopK = {"num_experts_per_tok", "experts_per_token"};
  d->experts = config.SizeOfAny(kCounts, kMaxExperts);
  d->top_k = config.SizeOfAny(kTopK, kMaxExperts);
  if (d->top_k > d->experts) {
    config.Fail("num_experts_per_tok", fmt::format("{} of {} experts", d->top_k, d->experts));
  }
  d->expert_width = family.experts == Experts::kMlp
                        ? config.Size("moe_intermediate_size", kMaxWidth)
                        : d->intermediate;
  if (family.shared == Shared::kGated) {
    d->shared_width = config.Size("shared_expert_intermediate_size", kMaxWidth);
  } else if (family.shared == Shared::kPlain) {
    d->shared_width = d->expert_width * config.CountOr("n_shared_experts", 64, 0);
  }
  if (family.sparse == Sparse::kByStep) {
    d->sparse_step = config.SizeOr("decoder_sparse_step", kMaxLayers, 1);
    d->dense_layers = config.IntegersOrEmpty("mlp_only_layers");
  } else if (family.sparse == Sparse::kAfterFirst) {
    d->first_dense = config.CountOr("first_k_dense_replace", kMaxLayers, 0);
    d->prediction_layers = config.CountOr("num_nextn_predict_layers", 16, 0);
  }
}

Result<Dimensions> ReadDimensions(const Family& family, ModelConfig& config) {
  Dimensions d;
  d.hidden = config.Size("hidden_size", kMaxWidth);
  d.layers = config.Size("num_hidden_layers", kMaxLayers);
  d.vocabulary = config.Size("vocab_size", kMaxVocabulary);
  d.intermediate = config.Size("intermediate_size", kMaxWidth);
  d.mlp_bias = family.model_type == "llama" && config.Bool("mlp_bias", false);
  d.tied = config.Bool("tie_word_embeddings", false);
  ReadAttention(family, config, &d);
  ReadExperts(family, config, &d);
  MARLIN_RETURN_IF_ERROR(config.status());
  const auto tensors =
      (Checked(d.layers + d.prediction_layers) * (Checked(3) * Checked(d.experts) + Checked(24)))
          .Take();
  if (!tensors || *tensors > kMaxTensors) {
    return Status(Code::kMalformedFile,
                  fmt::format("config.json: {} layers with {} experts are more than {} tensors",
                              d.layers, d.experts, kMaxTensors));
  }
  return d;
}

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
    family_.attention == Attention::kLatent ? AddLatentAttention() : AddAttention();
    AddInLayer("post_attention_layernorm.weight", {d_.hidden});
    if (family_.sandwich_norms) {
      AddInLayer("post_self_attn_layernorm.weight", {d_.hidden});
      AddInLayer("post_mlp_layernorm.weight", {d_.hidden});
    }
    IsSparse() ? AddExperts() : AddMlp("mlp", d_.intermediate);
  }

  bool IsSparse() const {
    if (family_.experts == Experts::kNone) return false;
    switch (family_.sparse) {
      case Sparse::kAllLayers:
        return true;
      case Sparse::kByStep:
        return (layer_ + 1) % d_.sparse_step == 0 &&
               std::find(d_.dense_layers.begin(), d_.dense_layers.end(), layer_) ==
                   d_.dense_layers.end();
      case Sparse::kAfterFirst:
        return layer_ >= d_.first_dense;
    }
    return false;
  }

  void AddAttention() {
    const int64_t q = d_.heads * d_.head_dim;
    const int64_t kv = d_.kv_heads * d_.head_dim;
    if (family_.attention == Attention::kFused) {
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
    if (family_.experts == Experts::kStacked) AddInLayer("self_attn.sinks", {d_.heads});
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
    if (family_.experts == Experts::kStacked) return AddStackedExperts();
    const bool block_sparse = family_.experts == Experts::kBlockSparse;
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
    if (family_.shared == Shared::kGated) {
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
      d.layers * (family->attention == Attention::kLatent ? d.kv_rank + d.rope_dim
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
