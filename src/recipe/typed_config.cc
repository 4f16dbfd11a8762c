#include "recipe/typed_config.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/macros.h"
#include "base/printable.h"
#include "recipe/name_list.h"
#include "recipe/text_config.h"

namespace marlin {
namespace {

/// Another name of a key, in configurations of one type.
struct Synonym {
  std::string_view model_type;
  std::string_view name;
  std::string_view key;
};
constexpr Synonym kSynonyms[] = {
    {"mixtral", "num_experts", "num_local_experts"},
    {"gpt_oss", "num_experts", "num_local_experts"},
    {"qwen3_moe", "num_local_experts", "num_experts"},
    {"qwen3_next", "mtp_num_hidden_layers", "num_nextn_predict_layers"},
    {"qwen3_5_text", "mtp_num_hidden_layers", "num_nextn_predict_layers"},
    {"qwen3_5_moe_text", "mtp_num_hidden_layers", "num_nextn_predict_layers"},
    {"glm4_moe", "num_local_experts", "n_routed_experts"},
    {"glm4_moe", "num_mtp_layers", "num_nextn_predict_layers"},
    {"glm4_moe_lite", "num_local_experts", "n_routed_experts"},
    {"glm4_moe_lite", "head_dim", "qk_rope_head_dim"},
    {"deepseek_v2", "head_dim", "qk_rope_head_dim"},
    {"deepseek_v2", "num_experts", "n_routed_experts"},
    {"deepseek_v3", "num_local_experts", "n_routed_experts"},
    {"deepseek_v3", "num_mtp_layers", "num_nextn_predict_layers"},
    {"kimi_k2", "num_local_experts", "n_routed_experts"},
    {"kimi_k2", "num_mtp_layers", "num_nextn_predict_layers"},
    {"minimax_m2", "num_experts", "num_local_experts"},
    {"ernie4_5_moe", "moe_num_experts", "num_experts"},
    {"ernie4_5_moe", "moe_k", "num_experts_per_tok"},
    {"ernie4_5_moe", "moe_num_shared_experts", "n_shared_experts"},
    {"hunyuan_v1_moe", "moe_topk", "num_experts_per_tok"},
    {"hunyuan_v1_moe", "num_local_experts", "num_experts"},
    {"dots1", "num_local_experts", "n_routed_experts"},
    {"olmoe", "num_local_experts", "num_experts"},
    {"deepseek_v32", "num_local_experts", "n_routed_experts"},
    {"deepseek_v32", "num_experts", "n_routed_experts"},
    {"deepseek_v32", "head_dim", "qk_rope_head_dim"},
    {"glm_moe_dsa", "num_local_experts", "n_routed_experts"},
    {"glm_moe_dsa", "num_experts", "n_routed_experts"},
    {"glm_moe_dsa", "head_dim", "qk_rope_head_dim"},
    {"qwen3_vl_moe_text", "num_local_experts", "num_experts"},
    {"glm4v_moe_text", "num_local_experts", "n_routed_experts"},
    {"flex_olmo", "num_local_experts", "num_experts"},
    {"solar_open", "num_local_experts", "n_routed_experts"},
    {"exaone_moe", "num_shared_experts", "n_shared_experts"},
    {"internlm3", "qkv_bias", "attention_bias"},
    {"internlm3", "bias", "mlp_bias"},
    {"youtu", "head_dim", "qk_rope_head_dim"},
    {"mistral4", "num_local_experts", "n_routed_experts"},
    {"hyperclovax", "logits_scaling", "logit_scale"},
    {"hy_v3", "num_local_experts", "num_experts"},
    {"hy_v3", "num_shared_experts", "n_shared_experts"},
    {"hy_v3", "router_scaling_factor", "routed_scaling_factor"},
    {"mellum", "num_local_experts", "num_experts"},
    {"lfm2", "norm_eps", "rms_norm_eps"},
    {"lfm2", "block_ff_dim", "intermediate_size"},
    {"lfm2", "tie_embedding", "tie_word_embeddings"},
    {"lfm2_moe", "norm_eps", "rms_norm_eps"},
    {"lfm2_moe", "tie_embedding", "tie_word_embeddings"},
    {"lfm2_moe", "num_dense_layers", "first_k_dense_replace"},
    {"granitemoehybrid", "layers_block_type", "layer_types"},
    {"nemotron_h", "layers_block_type", "layer_types"},
    {"nemotron_h", "num_local_experts", "n_routed_experts"},
    {"nemotron_h", "layer_norm_epsilon", "rms_norm_eps"},
    {"nemotron_h", "mamba_num_heads", "mamba_n_heads"},
    {"nemotron_h", "n_groups", "mamba_n_groups"},
    {"nemotron_h", "ssm_state_size", "mamba_d_state"},
    {"nemotron_h", "mamba_head_dim", "mamba_d_head"},
    {"nemotron_h", "conv_kernel", "mamba_d_conv"},
    {"nemotron_h", "use_conv_bias", "mamba_conv_bias"},
    {"nemotron_h", "mamba_dt_min", "time_step_min"},
    {"gemma4_text", "top_k_experts", "num_experts_per_tok"},
};

/// Keys that have defaults, too, but make a config without them a fragment.
constexpr std::string_view kRequired[] = {"hidden_size", "intermediate_size", "num_attention_heads",
                                          "num_hidden_layers", "vocab_size"};

/// Keys of RoPE, which rope_parameters.h reads from wherever they stand.
constexpr std::string_view kRopeKeys[] = {"rope_parameters", "rope_scaling", "rope_theta",
                                          "partial_rotary_factor",
                                          "original_max_position_embeddings"};

/// A key that changes nothing while it has this value, as has a list of such values. An empty
/// model_type stands for all types that do not read the key and have no guard of their own. The
/// value is JSON, numbers with a fraction.
struct Guard {
  std::string_view model_type;
  std::string_view key;
  std::string_view value;
};
constexpr Guard kGuards[] = {
    {"", "add_cross_attention", "false"},
    {"", "is_causal", "true"},
    {"", "is_encoder_decoder", "false"},
    {"", "moe_layer_freq", "1.0"},
    {"", "mtp_use_dedicated_embeddings", "false"},
    {"", "per_layer_config", "{}"},
    {"", "pruned_heads", "{}"},
    {"", "rope_interleaved", "false"},
    {"", "scoring_func", "\"sigmoid\""},
    {"", "topk_method", "\"noaux_tc\""},
    {"", "use_bidirectional_attention", "false"},
    {"", "use_double_wide_mlp", "false"},
    {"", "use_mrope", "false"},
    {"", "use_sliding_window", "false"},
    {"", "n_group", "1.0"},
    {"", "topk_group", "1.0"},
    {"", "routed_scaling_factor", "1.0"},
    {"cohere2", "use_gated_activation", "true"},
    {"cohere2", "use_parallel_block", "true"},
    {"cohere2", "rotary_pct", "1.0"},
    {"mixtral", "norm_topk_prob", "true"},
    {"gpt_oss", "norm_topk_prob", "true"},
    {"qwen3", "use_qk_norm", "true"},
    {"qwen3_moe", "use_qk_norm", "true"},
    {"glm4_moe_lite", "first_k_dense_replace", "1.0"},
    {"deepseek_v2", "norm_topk_prob", "false"},
    {"deepseek_v2", "scoring_func", "\"softmax\""},
    {"minimax_m2", "attn_type_list", "1.0"},
    {"minimax_m2", "layernorm_full_attention_beta", "1.0"},
    {"minimax_m2", "layernorm_linear_attention_beta", "1.0"},
    {"minimax_m2", "layernorm_mlp_beta", "1.0"},
    {"minimax_m2", "qk_norm_type", "\"per_layer\""},
    {"minimax_m2", "shared_intermediate_size", "0.0"},
    {"minimax_m2", "shared_moe_mode", "\"sigmoid\""},
    {"minimax_m2", "use_qk_norm", "true"},
    {"minimax_m2", "use_routing_bias", "true"},
    {"ernie4_5", "use_bias", "false"},
    {"ernie4_5", "use_rmsnorm", "true"},
    {"ernie4_5_moe", "moe_gate", "\"topk\""},
    {"ernie4_5_moe", "moe_use_aux_free", "true"},
    {"ernie4_5_moe", "use_bias", "false"},
    {"ernie4_5_moe", "use_rmsnorm", "true"},
    {"hunyuan_v1_dense", "norm_type", "\"rms\""},
    {"hunyuan_v1_dense", "use_qk_norm", "true"},
    {"hunyuan_v1_dense", "use_rotary_pos_emb", "true"},
    {"hunyuan_v1_moe", "moe_layer_num_skipped", "0.0"},
    {"hunyuan_v1_moe", "norm_topk_prob", "true"},
    {"hunyuan_v1_moe", "norm_type", "\"rms\""},
    {"hunyuan_v1_moe", "num_shared_expert", "1.0"},
    {"hunyuan_v1_moe", "use_mixed_mlp_moe", "true"},
    {"hunyuan_v1_moe", "use_qk_norm", "true"},
    {"hunyuan_v1_moe", "use_rotary_pos_emb", "true"},
    {"olmoe", "clip_qkv", "null"},
    {"deepseek_v2", "rope_interleave", "true"},
    {"deepseek_v32", "rope_interleave", "true"},
    {"glm_moe_dsa", "rope_interleave", "true"},
    {"deepseek_v32", "layer_types", "\"indexed_attention\""},
    {"glm_moe_dsa", "layer_types", "\"indexed_attention\""},
    {"qwen3_5_moe_text", "norm_topk_prob", "true"},
    // Text alone is the same with bidirectional attention to images.
    {"gemma4_text", "use_bidirectional_attention", "\"vision\""},
    {"gemma", "hidden_activation", "\"gelu_pytorch_tanh\""},
    {"cohere", "use_qk_norm", "false"},
    {"solar_open", "first_k_dense_replace", "0.0"},
    {"hyperclovax", "use_post_norm", "true"},
    {"hy_v3", "mlp_bias", "false"},
    {"mellum", "mlp_layer_types", "\"sparse\""},
    {"lfm2", "block_use_swiglu", "true"},
    {"lfm2", "use_pos_enc", "true"},
    {"granitemoehybrid", "normalization_function", "\"rmsnorm\""},
    {"nemotron_h", "moe_latent_size", "null"},
    {"nemotron_h", "sliding_window", "null"},
};

/// Keys that change no logits, in the order of their kinds: of the file, of training, of tokens and
/// generation, of other programs, and those that only say which tensors there are, since every
/// tensor must be there and used.
constexpr std::string_view kHarmless[] = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_experts_implementation",
    "_flash_attn_2_enabled",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "auto_map",
    "compression_config",
    "dtype",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "quantization",
    "quantization_config",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "use_cache",
    "use_flash_attention",
    "use_flash_attn",
    "torchscript",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "num_logits_to_keep",
    "tie_last_hidden_states",
    "chunk_size_feed_forward",
    "is_decoder",
    "cache_implementation",
    // layer_types say it.
    "_sliding_window_pattern",
    // Training.
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "aux_loss_alpha",
    "classifier_dropout",
    "embd_pdrop",
    "ep_size",
    "gradient_checkpointing",
    "hidden_dropout",
    "hidden_dropout_prob",
    "initializer_range",
    "moe_capacity",
    "pretraining_tp",
    "resid_pdrop",
    "residual_dropout",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "router_z_loss_coef",
    "seq_aux",
    "embedding_initializer_range",
    "block_mlp_init_scale",
    "block_out_init_scale",
    "block_use_xavier_init",
    "conv_use_xavier_init",
    // Tokens, generation and tasks.
    "bos_token_id",
    "eos_token_id",
    "eod_token_id",
    "pad_token_id",
    "unk_token_id",
    "decoder_start_token_id",
    "sep_token_id",
    "cls_token_id",
    "mask_token_id",
    "bad_words_ids",
    "begin_suppress_tokens",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "temperature",
    "tf_legacy_loss",
    "top_k",
    "top_p",
    "typical_p",
    "use_bfloat16",
    "finetuning_task",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "task_specific_params",
    "tokenizer_class",
    "prefix",
    "model_max_length",
    "max_sequence_length",
    // Other programs, which take them for contexts beyond the trained one or not at all.
    "dual_chunk_attention_config",
    "initial_context_length",
    "max_window_layers",
    "is_llama_config",
    // Indexers, which are not run.
    "indexer_rope_interleave",
    // Tensors.
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "mlp_layer_types",
    "norm_topk_prob",
    "mlp_only_layers",
    "decoder_sparse_step",
    "first_k_dense_replace",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "top_k_experts",
    "intermediate_size",
    "mtp_layer_types",
    "mtp_mlp_layer_types",
    // Rounding.
    "enable_moe_fp32_combine",
    // How Mamba-2 is computed and trained, and what its other keys determine.
    "chunk_size",
    "expand",
    "mamba_chunk_size",
    "mamba_dt_init_floor",
    "mamba_dt_limit",
    "mamba_dt_max",
    "mamba_expand",
    "mamba_proj_bias",
    "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap",
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
    "num_hidden_layers",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "time_step_floor",
    "time_step_limit",
    "time_step_max",
    "use_mamba_kernels",
};

/// Beginnings of the words of names that suggest a change of results.
constexpr std::string_view kSuspectWords[] = {
    "rope",  "rotary",  "yarn",      "alibi",     "scal",  "multiplier", "softcap",    "clip",
    "clamp", "limit",   "window",    "sliding",   "chunk", "sparse",     "causal",     "bidirec",
    "norm",  "rmsnorm", "layernorm", "epsilon",   "bias",  "activation", "swiglu",     "geglu",
    "rout",  "expert",  "residual",  "attention", "attn",  "theta",      "interleave", "nope",
    "mup",   "moe",     "shared",    "freq",
};
/// The same for whole words.
constexpr std::string_view kSuspectTokens[] = {"act", "cap", "eps", "glu", "qk", "kv", "soft"};

bool IsSuspect(std::string_view key) {
  while (!key.empty()) {
    const size_t end = std::min(key.find_first_of("_.-"), key.size());
    const std::string_view word = key.substr(0, end);
    key.remove_prefix(std::min(end + 1, key.size()));
    if (Contains(kSuspectTokens, word)) return true;
    for (const std::string_view suspect : kSuspectWords) {
      if (word.starts_with(suspect)) return true;
    }
  }
  return false;
}

const Guard* FindGuard(std::string_view model_type, std::string_view key) {
  const Guard* of_all = nullptr;
  for (const Guard& guard : kGuards) {
    if (guard.key != key) continue;
    if (guard.model_type == model_type) return &guard;
    if (guard.model_type.empty()) of_all = &guard;
  }
  return of_all;
}

const Synonym* FindSynonym(std::string_view model_type, std::string_view name) {
  for (const Synonym& synonym : kSynonyms) {
    if (synonym.model_type == model_type && synonym.name == name) return &synonym;
  }
  return nullptr;
}

/// Values that switch a feature off, whatever it is.
bool IsOff(const Json& value) {
  return value.is_null() || value == false || (value.is_structured() && value.empty());
}

bool IsGuarded(const Guard& guard, const Json& value) {
  if (value.is_null() || (IsOff(value) && guard.value != "true")) return true;
  if (value.is_array()) {
    return std::all_of(value.begin(), value.end(),
                       [&](const Json& entry) { return IsGuarded(guard, entry); });
  }
  if (value.is_number()) return DumpJson(Json(value.get<double>())) == guard.value;
  return DumpJson(value) == guard.value;
}

class ConfigTyper {
 public:
  /// `complete`: the type's defaults stand for missing sizes, too.
  ConfigTyper(const Family& family, const ModelConfig& source, bool complete)
      : type_(family.model_type),
        whole_head_dim_(family.whole_head_dim),
        source_(source.values()),
        file_(source.file()),
        complete_(complete) {}

  /// The keys that are read.
  Result<Json> Merge() {
    const std::string_view text = TypeDefaults(type_);
    MARLIN_ASSIGN_OR_RETURN(Json merged, ParseJsonObject(text, file_));
    for (const std::string_view key : kRequired) {
      if (!complete_ && !source_.contains(key)) merged.erase(std::string(key));
    }
    for (const auto& [key, value] : source_.items()) {
      if (merged.contains(key) || Contains(kRopeKeys, key)) {
        // A null stands for no value where a type knows none; otherwise its reader reports it.
        if (!value.is_null() || !Contains(kRopeKeys, key)) merged[key] = value;
      }
    }
    for (const Synonym& synonym : kSynonyms) {
      if (synonym.model_type == type_) MARLIN_RETURN_IF_ERROR(Take(synonym, &merged));
    }
    merged["model_type"] = std::string(type_);
    known_ = merged;
    return merged;
  }

  /// The keys that are not read. Precondition: Merge().
  Result<std::vector<std::string>> CheckOthers() const {
    std::vector<std::string> ignored;
    for (const auto& [key, value] : source_.items()) {
      if (known_.contains(key) || Contains(kRopeKeys, key)) {
        const Guard* const guard = FindGuard(type_, key);
        if (guard != nullptr && guard->model_type == type_ && !IsGuarded(*guard, value)) {
          return Refuse(key, value);
        }
        continue;
      }
      if (FindSynonym(type_, key) != nullptr) continue;
      MARLIN_ASSIGN_OR_RETURN(const bool changes_nothing, IsNeutral(key, value));
      if (!changes_nothing) ignored.push_back(Printable(key));
    }
    return ignored;
  }

 private:
  Status Take(const Synonym& synonym, Json* merged) const {
    const auto found = source_.find(synonym.name);
    if (found == source_.end() || found->is_null()) return {};
    const auto own = source_.find(synonym.key);
    if (own != source_.end() && !own->is_null() && *own != *found) {
      return Status(Code::kMalformedFile,
                    fmt::format("{}: {}: {}, but {} is {}", file_, synonym.name,
                                DescribeJson(*found), synonym.key, DescribeJson(*own)));
    }
    (*merged)[std::string(synonym.key)] = *found;
    return {};
  }

  /// Whether an unread key leaves results as they are; false: nothing is known of it. Errors:
  /// kUnsupported.
  Result<bool> IsNeutral(const std::string& key, const Json& value) const {
    if (const Guard* const guard = FindGuard(type_, key)) {
      if (IsGuarded(*guard, value)) return true;
      return Refuse(key, value);
    }
    if (Contains(kHarmless, key)) return true;
    const bool of_sum = key == "qk_head_dim" || (key == "head_dim" && whole_head_dim_);
    if (of_sum && IsSumOfHeadDims(value)) return true;
    for (const auto& [name, other] : kEquals) {
      if (key == name && known_.contains(other)) {
        if (value.is_null() || value == known_[std::string(other)]) return true;
        return Refuse(key, value);
      }
    }
    if (IsOff(value)) return true;
    if (key == "layer_types") {
      if (LayersHaveOneType(value)) return true;
      return Refuse(key, value);
    }
    if (IsSuspect(key)) return Refuse(key, value);
    return false;
  }

  /// Whether layer_types of a type that does not read them say what it does.
  bool LayersHaveOneType(const Json& value) const {
    const auto window = known_.find("sliding_window");
    const auto asks = known_.find("use_sliding_window");
    const bool slides =
        window != known_.end() && window->is_number() && (asks == known_.end() || *asks == true);
    const char* const expected = slides ? "sliding_attention" : "full_attention";
    return value.is_array() && std::all_of(value.begin(), value.end(),
                                           [&](const Json& type) { return type == expected; });
  }
  bool IsSumOfHeadDims(const Json& value) const {
    const auto nope = known_.find("qk_nope_head_dim");
    const auto rope = known_.find("qk_rope_head_dim");
    return nope != known_.end() && rope != known_.end() && nope->is_number_integer() &&
           rope->is_number_integer() && value.is_number_integer() &&
           value.get<double>() == nope->get<double>() + rope->get<double>();
  }

  Status Refuse(const std::string& key, const Json& value) const {
    return Status(Code::kUnsupported,
                  fmt::format("{}: {}: {} is not understood in a {}, and may change its results",
                              file_, Printable(key), DescribeJson(value), type_));
  }

  /// Keys that repeat another one.
  static constexpr std::pair<std::string_view, std::string_view> kEquals[] = {
      {"experts_per_token", "num_experts_per_tok"},
      {"head_dim", "qk_rope_head_dim"},
      {"attention_head_dim", "head_dim"},
      {"hidden_act", "hidden_activation"},
      {"block_dim", "hidden_size"},
      {"block_norm_eps", "rms_norm_eps"},
      {"conv_dim", "hidden_size"},
      {"conv_dim_out", "hidden_size"},
      {"num_heads", "num_attention_heads"},
  };

  const std::string_view type_;
  const bool whole_head_dim_;
  const Json& source_;
  const std::string& file_;
  const bool complete_;
  Json known_;
};

}  // namespace

Result<TypedConfig> ReadTypedConfig(ModelConfig source, UnknownKeys unknown) {
  TypedConfig typed;
  MARLIN_ASSIGN_OR_RETURN(std::optional<TextConfig> text,
                          ReadTextConfig(source.values(), source.file()));
  const bool nested = text && text->nested;
  typed.source = text ? std::move(text->config) : std::move(source);
  const std::string model_type = typed.source.String("model_type");
  MARLIN_RETURN_IF_ERROR(typed.source.status());
  MARLIN_ASSIGN_OR_RETURN(typed.family, FindFamily(model_type));
  ConfigTyper typer(*typed.family, typed.source, nested);
  MARLIN_ASSIGN_OR_RETURN(Json merged, typer.Merge());
  if (unknown == UnknownKeys::kRefuse) {
    MARLIN_ASSIGN_OR_RETURN(typed.ignored, typer.CheckOthers());
  }
  typed.config = ModelConfig::Of(std::move(merged), typed.source.file());
  return typed;
}

std::string_view KeyTreatment(std::string_view model_type, std::string_view key) {
  const Result<Json> defaults = ParseJsonObject(TypeDefaults(model_type), "defaults");
  if (defaults.ok() && defaults->contains(std::string(key))) return "read";
  if (Contains(kRopeKeys, key) || FindSynonym(model_type, key) != nullptr) return "read";
  if (FindGuard(model_type, key) != nullptr) return "guarded";
  if (Contains(kHarmless, key)) return "harmless";
  return IsSuspect(key) ? "suspect" : "ignored";
}

}  // namespace marlin
