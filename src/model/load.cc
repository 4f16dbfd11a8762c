// Which tensor fills which layer, by the names that the families' reference implementations use.
#include <fmt/format.h>

#include <cstring>

#include "base/macros.h"
#include "model/layers.h"
#include "model/weight_source.h"

namespace marlin {
namespace {

class DecoderLoader {
 public:
  DecoderLoader(const Checkpoint& checkpoint, const Device& device, const DecoderConfig& config)
      : device_(device),
        source_(checkpoint, device, std::string(config.family->model_type)),
        config_(config),
        shape_(config.shape) {}

  Status Load(Decoder* decoder) {
    MARLIN_RETURN_IF_ERROR(LoadEmbedding(decoder));
    for (layer_ = 0; layer_ < shape_.layers; ++layer_) {
      DecoderLayer layer;
      MARLIN_RETURN_IF_ERROR(LoadLayer(&layer));
      decoder->layers.push_back(std::move(layer));
    }
    MARLIN_ASSIGN_OR_RETURN(decoder->norm, Upload("model.norm.weight", shape_.hidden));
    IgnoreExtras();
    MARLIN_RETURN_IF_ERROR(source_.CheckAllUsed());
    decoder->parameters = source_.parameters();
    decoder->bytes = source_.bytes();
    return {};
  }

 private:
  std::string Name(std::string_view name) const {
    return fmt::format("model.layers.{}.{}", layer_, name);
  }
  Result<DeviceVector> Vector(std::string_view name, int64_t count) {
    return Upload(Name(name), count);
  }
  Result<DeviceVector> Upload(const std::string& name, int64_t count) {
    MARLIN_ASSIGN_OR_RETURN(const std::vector<float> values, source_.LoadVector(name, count));
    return DeviceVector::Upload(device_, values);
  }
  Result<Projection> Linear(std::string_view name, int64_t in, int64_t out, bool bias) {
    return Linears({{std::string(name), out}}, in, bias);
  }

  /// Linear layers "<name>.weight" of one input side by side, with "<name>.bias".
  struct Piece {
    std::string name;
    int64_t out;
  };
  Result<Projection> Linears(const std::vector<Piece>& pieces, int64_t in, bool bias) {
    std::vector<MatrixRequest> requests;
    requests.reserve(pieces.size());
    for (const Piece& piece : pieces) requests.push_back({Name(piece.name + ".weight"), piece.out});
    MARLIN_ASSIGN_OR_RETURN(Projection projection, source_.Load(requests, in));
    if (!bias) return projection;
    std::vector<float> all;
    for (const Piece& piece : pieces) {
      MARLIN_ASSIGN_OR_RETURN(const std::vector<float> values,
                              source_.LoadVector(Name(piece.name + ".bias"), piece.out));
      all.insert(all.end(), values.begin(), values.end());
    }
    MARLIN_RETURN_IF_ERROR(SetBias(device_, all, &projection));
    return projection;
  }

  Status LoadEmbedding(Decoder* decoder) {
    const std::string name = "model.embed_tokens.weight";
    const std::vector<MatrixRequest> table = {{name, shape_.vocabulary}};
    if (source_.checkpoint().Find(name) != nullptr) {
      MARLIN_ASSIGN_OR_RETURN(decoder->embedding,
                              source_.LoadInPlace(name, {shape_.vocabulary, shape_.hidden}));
      // Some writers align nothing; then the table is copied.
      const auto address = reinterpret_cast<uintptr_t>(decoder->embedding.data());
      const auto size = static_cast<uintptr_t>(DTypeBytes(decoder->embedding.dtype()));
      if (address % size != 0) decoder->embedding = TensorView();
    }
    if (decoder->embedding.empty() || shape_.tied) {
      MARLIN_ASSIGN_OR_RETURN(decoder->embedding_projection, source_.Load(table, shape_.hidden));
    }
    if (shape_.tied) {
      // Some writers store the copy as well.
      source_.Ignore("lm_head.weight");
      return {};
    }
    const std::vector<MatrixRequest> head = {{"lm_head.weight", shape_.vocabulary}};
    MARLIN_ASSIGN_OR_RETURN(decoder->head, source_.Load(head, shape_.hidden));
    return {};
  }

  Status LoadLayer(DecoderLayer* layer) {
    const int64_t hidden = shape_.hidden;
    MARLIN_ASSIGN_OR_RETURN(layer->input_norm, Vector("input_layernorm.weight", hidden));
    MARLIN_RETURN_IF_ERROR(config_.latent() ? LoadLatent(&layer->latent)
                                            : LoadAttention(&layer->attention));
    MARLIN_ASSIGN_OR_RETURN(layer->mlp_norm, Vector("post_attention_layernorm.weight", hidden));
    if (config_.family->sandwich_norms) {
      MARLIN_ASSIGN_OR_RETURN(layer->attention_out_norm,
                              Vector("post_self_attn_layernorm.weight", hidden));
      MARLIN_ASSIGN_OR_RETURN(layer->mlp_out_norm, Vector("post_mlp_layernorm.weight", hidden));
    }
    if (IsSparse(*config_.family, shape_, layer_)) return LoadExperts(&layer->experts);
    return LoadMlp("mlp", shape_.intermediate, shape_.mlp_bias, &layer->mlp);
  }

  Status LoadAttention(AttentionLayer* attention) {
    const int64_t q = shape_.heads * shape_.head_dim;
    const int64_t kv = shape_.kv_heads * shape_.head_dim;
    MARLIN_ASSIGN_OR_RETURN(
        attention->qkv,
        Linears({{"self_attn.q_proj", q}, {"self_attn.k_proj", kv}, {"self_attn.v_proj", kv}},
                shape_.hidden, shape_.qkv_bias));
    MARLIN_ASSIGN_OR_RETURN(attention->out, Linear("self_attn.o_proj", q, shape_.hidden,
                                                   shape_.qkv_bias && config_.family->o_bias));
    if (shape_.qk_norm) {
      MARLIN_ASSIGN_OR_RETURN(attention->q_norm,
                              Vector("self_attn.q_norm.weight", shape_.head_dim));
      MARLIN_ASSIGN_OR_RETURN(attention->k_norm,
                              Vector("self_attn.k_norm.weight", shape_.head_dim));
    }
    if (config_.family->experts == ExpertLayout::kStacked) {
      MARLIN_ASSIGN_OR_RETURN(attention->sinks, Vector("self_attn.sinks", shape_.heads));
    }
    return {};
  }

  Status LoadLatent(LatentAttentionLayer* latent) {
    const int64_t q_out = shape_.heads * config_.key_dim();
    const bool bias = shape_.qkv_bias;
    if (shape_.q_rank == 0) {
      MARLIN_ASSIGN_OR_RETURN(latent->q, Linear("self_attn.q_proj", shape_.hidden, q_out, false));
    } else {
      MARLIN_ASSIGN_OR_RETURN(latent->q_a,
                              Linear("self_attn.q_a_proj", shape_.hidden, shape_.q_rank, bias));
      MARLIN_ASSIGN_OR_RETURN(latent->q_a_norm,
                              Vector("self_attn.q_a_layernorm.weight", shape_.q_rank));
      MARLIN_ASSIGN_OR_RETURN(latent->q_b,
                              Linear("self_attn.q_b_proj", shape_.q_rank, q_out, false));
    }
    MARLIN_ASSIGN_OR_RETURN(latent->kv_a, Linear("self_attn.kv_a_proj_with_mqa", shape_.hidden,
                                                 shape_.kv_rank + shape_.rope_dim, bias));
    MARLIN_ASSIGN_OR_RETURN(latent->kv_a_norm,
                            Vector("self_attn.kv_a_layernorm.weight", shape_.kv_rank));
    MARLIN_ASSIGN_OR_RETURN(latent->kv_b,
                            Linear("self_attn.kv_b_proj", shape_.kv_rank,
                                   shape_.heads * (shape_.nope_dim + shape_.v_dim), false));
    MARLIN_ASSIGN_OR_RETURN(
        latent->out, Linear("self_attn.o_proj", shape_.heads * shape_.v_dim, shape_.hidden, bias));
    return {};
  }

  Status LoadMlp(const std::string& prefix, int64_t width, bool bias, MlpLayer* mlp) {
    const bool fused = config_.family->fused_gate_up;
    const std::vector<Piece> pieces =
        fused ? std::vector<Piece>{{prefix + ".gate_up_proj", 2 * width}}
              : std::vector<Piece>{{prefix + ".gate_proj", width}, {prefix + ".up_proj", width}};
    MARLIN_ASSIGN_OR_RETURN(mlp->gate_up, Linears(pieces, shape_.hidden, bias));
    MARLIN_ASSIGN_OR_RETURN(mlp->down, Linear(prefix + ".down_proj", width, shape_.hidden, bias));
    return {};
  }

  Status LoadExperts(ExpertsLayer* layer) {
    // Mixtral's block has two names in the wild.
    const bool block_sparse = source_.Has(Name("block_sparse_moe.gate.weight"));
    const std::string block = block_sparse ? "block_sparse_moe" : "mlp";
    const bool stacked = config_.family->experts == ExpertLayout::kStacked;
    const std::string router = block + (stacked ? ".router" : ".gate");
    MARLIN_ASSIGN_OR_RETURN(layer->router, Linear(router, shape_.hidden, shape_.experts, stacked));
    if (config_.family->correction_bias) {
      MARLIN_ASSIGN_OR_RETURN(layer->choice_bias,
                              Vector(block + ".gate.e_score_correction_bias", shape_.experts));
    }
    for (int64_t expert = 0; expert < shape_.experts; ++expert) {
      MlpLayer mlp;
      MARLIN_RETURN_IF_ERROR(LoadExpert(block, expert, &mlp));
      layer->experts.push_back(std::move(mlp));
    }
    return LoadShared(block, layer);
  }

  Status LoadExpert(const std::string& block, int64_t expert, MlpLayer* mlp) {
    const int64_t width = shape_.expert_width;
    const std::string fused = Name(block + ".experts.gate_up_proj");
    std::vector<MatrixRequest> gate_up;
    MatrixRequest down;
    if (source_.Has(fused)) {
      const bool interleaved = config_.family->experts == ExpertLayout::kStacked;
      gate_up = {{fused, 2 * width, expert, shape_.experts, interleaved}};
      down = {Name(block + ".experts.down_proj"), shape_.hidden, expert, shape_.experts};
    } else {
      const bool short_names = source_.Has(Name(fmt::format("{}.experts.0.w1.weight", block)));
      const auto name = [&](std::string_view usual, std::string_view w) {
        return Name(fmt::format("{}.experts.{}.{}.weight", block, expert, short_names ? w : usual));
      };
      gate_up = {{name("gate_proj", "w1"), width, -1, shape_.experts},
                 {name("up_proj", "w3"), width, -1, shape_.experts}};
      down = {name("down_proj", "w2"), shape_.hidden, -1, shape_.experts};
    }
    MARLIN_ASSIGN_OR_RETURN(mlp->gate_up, source_.Load(gate_up, shape_.hidden));
    MARLIN_ASSIGN_OR_RETURN(mlp->down, source_.Load({&down, 1}, width));
    if (config_.family->experts == ExpertLayout::kStacked) {
      return LoadExpertBiases(block, expert, mlp);
    }
    return {};
  }

  Status LoadExpertBiases(const std::string& block, int64_t expert, MlpLayer* mlp) {
    const int64_t width = shape_.expert_width;
    MARLIN_ASSIGN_OR_RETURN(const std::vector<float> both,
                            source_.LoadVector(Name(block + ".experts.gate_up_proj_bias"),
                                               2 * width, expert, shape_.experts));
    std::vector<float> gate_up;
    for (size_t first = 0; first < 2; ++first) {
      for (size_t i = first; i < both.size(); i += 2) gate_up.push_back(both[i]);
    }
    MARLIN_RETURN_IF_ERROR(SetBias(device_, gate_up, &mlp->gate_up));
    MARLIN_ASSIGN_OR_RETURN(const std::vector<float> down,
                            source_.LoadVector(Name(block + ".experts.down_proj_bias"),
                                               shape_.hidden, expert, shape_.experts));
    return SetBias(device_, down, &mlp->down);
  }

  Status LoadShared(const std::string& block, ExpertsLayer* layer) {
    if (shape_.shared_width == 0) return {};
    const bool gated = config_.family->shared == SharedExperts::kGated;
    const std::string name = block + (gated ? ".shared_expert" : ".shared_experts");
    MARLIN_RETURN_IF_ERROR(LoadMlp(name, shape_.shared_width, false, &layer->shared));
    if (!gated) return {};
    MARLIN_ASSIGN_OR_RETURN(layer->shared_gate,
                            Linear(block + ".shared_expert_gate", shape_.hidden, 1, false));
    return {};
  }

  /// Layers that predict further tokens, and frequencies that old writers stored.
  void IgnoreExtras() {
    for (const TensorInfo& tensor : source_.checkpoint().tensors()) {
      if (tensor.name.ends_with(".rotary_emb.inv_freq") || IsPrediction(tensor.name)) {
        source_.Ignore(tensor.name);
      }
    }
    for (const QuantizedModule& module : source_.checkpoint().modules()) {
      if (IsPrediction(module.name)) source_.Ignore(module.name);
    }
  }
  bool IsPrediction(const std::string& name) const {
    for (int64_t i = 0; i < shape_.prediction_layers; ++i) {
      if (name.starts_with(fmt::format("model.layers.{}.", shape_.layers + i))) return true;
    }
    return false;
  }

  const Device& device_;
  WeightSource source_;
  const DecoderConfig& config_;
  const Dimensions& shape_;
  int64_t layer_ = 0;
};

}  // namespace

Result<Decoder> LoadDecoder(const Checkpoint& checkpoint, DecoderConfig config,
                            const Device& device) {
  Decoder decoder{std::move(config), checkpoint, {}, {}, {}, {}, {}, {}, {}, 0, 0};
  DecoderLoader loader(decoder.checkpoint, device, decoder.config);
  MARLIN_RETURN_IF_ERROR(loader.Load(&decoder));
  return decoder;
}

}  // namespace marlin
