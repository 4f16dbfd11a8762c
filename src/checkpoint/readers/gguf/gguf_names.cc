#include "checkpoint/readers/gguf/gguf_names.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace marlin {
namespace {

constexpr GgufArchitecture kArchitectures[] = {
    {"llama", "llama", "mixtral", true},
    {"qwen2", "qwen2", "", false},
    {"qwen3", "qwen3", "", false},
    {"qwen2moe", "qwen2_moe", "", false},
    {"qwen3moe", "qwen3_moe", "", false},
    {"glm4", "glm4", "", false},
    {"glm4moe", "glm4_moe", "", false},
    {"gpt-oss", "gpt_oss", "", false},
    {"deepseek2", "deepseek_v3", "", false},
    {"phi3", "phi3", "", false},
    {"seed_oss", "seed_oss", "", false},
    {"smollm3", "smollm3", "", true},
    {"granite", "granite", "", true},
    {"olmo2", "olmo2", "", false},
    {"qwen2vl", "qwen2_vl_text", "", false},
    {"qwen3vl", "qwen3_vl_text", "", false},
    {"qwen3vlmoe", "qwen3_vl_moe_text", "", false},
};

/// Types that are another one in these files, whose architectures have a key for the difference.
constexpr std::pair<std::string_view, std::string_view> kSameTypes[] = {
    {"mistral", "llama"},  // With a sliding window.
    {"qwen2_5_vl_text", "qwen2_vl_text"},
};

struct NameRow {
  std::string_view gguf;
  std::string_view name;
  std::string_view types;  ///< One, or several; empty: all without a row of their own before it.
  GgufPlace::Rows rows = GgufPlace::Rows::kStraight;
  bool experts = false;
  bool as_row = false;
};
constexpr auto kStraight = GgufPlace::Rows::kStraight;

constexpr NameRow kGlobalNames[] = {
    {"token_embd", "model.embed_tokens", ""},
    {"output_norm", "model.norm", ""},
    {"output", "lm_head", ""},
};

// "mixtral" stands for llama with experts.
constexpr NameRow kLayerNames[] = {
    {"attn_norm", "input_layernorm", ""},
    {"attn_q", "self_attn.q_proj", "", GgufPlace::Rows::kQueryHeads},
    {"attn_k", "self_attn.k_proj", "", GgufPlace::Rows::kKeyHeads},
    {"attn_v", "self_attn.v_proj", ""},
    {"attn_qkv", "self_attn.qkv_proj", "phi3"},
    {"attn_output", "self_attn.o_proj", ""},
    {"attn_q_norm", "self_attn.q_norm", ""},
    {"attn_k_norm", "self_attn.k_norm", ""},
    {"attn_sinks", "self_attn.sinks", ""},
    {"attn_q_a", "self_attn.q_a_proj", ""},
    {"attn_q_a_norm", "self_attn.q_a_layernorm", ""},
    {"attn_q_b", "self_attn.q_b_proj", ""},
    {"attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa", ""},
    {"attn_kv_a_norm", "self_attn.kv_a_layernorm", ""},
    {"attn_kv_b", "self_attn.kv_b_proj", ""},
    {"post_attention_norm", "post_attention_layernorm", "glm4_moe gpt_oss seed_oss olmo2"},
    {"ffn_norm", "post_attention_layernorm", ""},
    {"post_attention_norm", "post_self_attn_layernorm", "glm4"},
    {"post_attention_norm", "post_attention_layernorm", ""},
    {"post_ffw_norm", "post_feedforward_layernorm", "olmo2"},
    {"post_ffw_norm", "post_mlp_layernorm", ""},
    {"ffn_gate", "mlp.gate_proj", ""},
    {"ffn_up", "mlp.gate_up_proj", "glm4 phi3"},
    {"ffn_up", "mlp.up_proj", ""},
    {"ffn_down", "mlp.down_proj", ""},
    {"ffn_gate_inp", "block_sparse_moe.gate", "mixtral"},
    {"ffn_gate_inp", "mlp.router", "gpt_oss"},
    {"ffn_gate_inp", "mlp.gate", ""},
    {"ffn_gate_exps", "block_sparse_moe.experts.*.w1", "mixtral", kStraight, true},
    {"ffn_up_exps", "block_sparse_moe.experts.*.w3", "mixtral", kStraight, true},
    {"ffn_down_exps", "block_sparse_moe.experts.*.w2", "mixtral", kStraight, true},
    {"ffn_down_exps", "mlp.experts.down_proj", "gpt_oss", kStraight, true},
    {"ffn_gate_exps", "mlp.experts.gate_up_proj", "gpt_oss", kStraight, true},
    {"ffn_gate_exps", "mlp.experts.*.gate_proj", "", kStraight, true},
    {"ffn_up_exps", "mlp.experts.*.up_proj", "", kStraight, true},
    {"ffn_down_exps", "mlp.experts.*.down_proj", "", kStraight, true},
    {"ffn_gate_shexp", "mlp.shared_expert.gate_proj", "qwen2_moe"},
    {"ffn_up_shexp", "mlp.shared_expert.up_proj", "qwen2_moe"},
    {"ffn_down_shexp", "mlp.shared_expert.down_proj", "qwen2_moe"},
    {"ffn_gate_shexp", "mlp.shared_experts.gate_proj", ""},
    {"ffn_up_shexp", "mlp.shared_experts.up_proj", ""},
    {"ffn_down_shexp", "mlp.shared_experts.down_proj", ""},
    {"ffn_gate_inp_shexp", "mlp.shared_expert_gate", "", kStraight, false, true},
    {"exp_probs_b", "mlp.gate.e_score_correction", ""},
    {"nextn.eh_proj", "eh_proj", ""},
    {"nextn.embed_tokens", "embed_tokens", ""},
    {"nextn.enorm", "enorm", ""},
    {"nextn.hnorm", "hnorm", ""},
    {"nextn.shared_head_head", "shared_head.head", ""},
    {"nextn.shared_head_norm", "shared_head.norm", ""},
};

/// Whether a word is in a list with spaces.
bool HasWord(std::string_view list, std::string_view word) {
  while (!list.empty()) {
    const size_t end = std::min(list.find(' '), list.size());
    if (list.substr(0, end) == word) return true;
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return false;
}

template <size_t kCount>
const NameRow* FindRow(const NameRow (&rows)[kCount], std::string_view stem,
                       std::string_view model_type) {
  const NameRow* const found = std::find_if(rows, rows + kCount, [&](const NameRow& row) {
    return row.gguf == stem && (row.types.empty() || HasWord(row.types, model_type));
  });
  return found == rows + kCount ? nullptr : found;
}

/// "blk.<layer>.<stem>.<suffix>" or "<stem>.<suffix>" in parts; the layer is empty without "blk.".
struct NameParts {
  std::string_view layer;
  std::string_view stem;
  std::string_view suffix;
};

std::optional<NameParts> Split(std::string_view name) {
  NameParts parts;
  constexpr std::string_view kBlock = "blk.";
  if (name.starts_with(kBlock)) {
    name.remove_prefix(kBlock.size());
    const size_t dot = name.find('.');
    if (dot == std::string_view::npos || dot == 0) return std::nullopt;
    parts.layer = name.substr(0, dot);
    const bool digits = std::all_of(parts.layer.begin(), parts.layer.end(),
                                    [](char c) { return c >= '0' && c <= '9'; });
    if (!digits) return std::nullopt;
    name.remove_prefix(dot + 1);
  }
  const size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return std::nullopt;
  parts.stem = name.substr(0, dot);
  parts.suffix = name.substr(dot + 1);
  return parts;
}

/// The type whose rows of kLayerNames apply.
std::string_view TypeOf(const GgufArchitecture& architecture, bool with_experts) {
  const bool other = with_experts && !architecture.expert_type.empty();
  return other ? architecture.expert_type : architecture.model_type;
}

/// Tensors that have no suffix elsewhere, or another one.
std::string FullName(std::string_view name, std::string_view suffix) {
  if (name == "self_attn.sinks") return std::string(name);
  if (name == "mlp.experts.gate_up_proj" || name == "mlp.experts.down_proj") {
    return suffix == "bias" ? fmt::format("{}_bias", name) : std::string(name);
  }
  if (name == "mlp.gate.e_score_correction") return fmt::format("{}_bias", name);
  return fmt::format("{}.{}", name, suffix);
}

}  // namespace

const GgufArchitecture* FindGgufArchitecture(std::string_view name) {
  for (const GgufArchitecture& architecture : kArchitectures) {
    if (architecture.name == name) return &architecture;
  }
  return nullptr;
}

GgufPlace PlaceGgufTensor(const GgufArchitecture& architecture, bool with_experts,
                          std::string_view name) {
  GgufPlace place;
  place.name = name;
  const std::optional<NameParts> parts = Split(name);
  if (!parts || (parts->suffix != "weight" && parts->suffix != "bias")) return place;
  if (parts->layer.empty()) {
    const NameRow* const row = FindRow(kGlobalNames, parts->stem, architecture.model_type);
    if (row != nullptr) place.name = fmt::format("{}.{}", row->name, parts->suffix);
    return place;
  }
  const NameRow* const row = FindRow(kLayerNames, parts->stem, TypeOf(architecture, with_experts));
  if (row == nullptr) return place;
  place.name = fmt::format("model.layers.{}.{}", parts->layer, FullName(row->name, parts->suffix));
  place.experts = row->experts;
  place.as_row = row->as_row && parts->suffix == "weight";
  if (architecture.paired_heads) place.rows = row->rows;
  return place;
}

const GgufArchitecture* FindGgufArchitectureOf(std::string_view model_type, bool* with_experts) {
  for (const auto& [type, same] : kSameTypes) {
    if (model_type == type) model_type = same;
  }
  for (const GgufArchitecture& architecture : kArchitectures) {
    *with_experts = !architecture.expert_type.empty() && model_type == architecture.expert_type;
    if (*with_experts || model_type == architecture.model_type) return &architecture;
  }
  return nullptr;
}

std::vector<std::string_view> GgufModelTypes() {
  std::vector<std::string_view> types;
  for (const GgufArchitecture& architecture : kArchitectures) {
    types.push_back(architecture.model_type);
    if (!architecture.expert_type.empty()) types.push_back(architecture.expert_type);
  }
  for (const auto& [type, same] : kSameTypes) types.push_back(type);
  std::sort(types.begin(), types.end());
  return types;
}

std::optional<std::string> GgufTensorName(const GgufArchitecture& architecture, bool with_experts,
                                          std::string_view name) {
  const std::string_view suffix = name.ends_with("bias") ? "bias" : "weight";
  constexpr std::string_view kLayers = "model.layers.";
  if (!name.starts_with(kLayers)) {
    for (const NameRow& row : kGlobalNames) {
      if (name == fmt::format("{}.{}", row.name, suffix)) {
        return fmt::format("{}.{}", row.gguf, suffix);
      }
    }
    return std::nullopt;
  }
  const std::string_view in_layers = name.substr(kLayers.size());
  const size_t dot = in_layers.find('.');
  if (dot == std::string_view::npos) return std::nullopt;
  const std::string_view in_layer = in_layers.substr(dot + 1);
  for (const NameRow& row : kLayerNames) {
    if (FullName(row.name, suffix) != in_layer) continue;
    // The row must be the one that reading finds.
    if (FindRow(kLayerNames, row.gguf, TypeOf(architecture, with_experts)) != &row) continue;
    std::string found = fmt::format("blk.{}.{}.{}", in_layers.substr(0, dot), row.gguf, suffix);
    if (PlaceGgufTensor(architecture, with_experts, found).name == name) return found;
  }
  return std::nullopt;
}

std::optional<std::string> GgufInterleavedPartner(const GgufArchitecture& architecture,
                                                  std::string_view name) {
  if (architecture.model_type != "gpt_oss") return std::nullopt;
  constexpr std::string_view kGate = ".ffn_gate_exps.";
  const size_t at = name.find(kGate);
  if (at == std::string_view::npos) return std::nullopt;
  return fmt::format("{}.ffn_up_exps.{}", name.substr(0, at), name.substr(at + kGate.size()));
}

}  // namespace marlin
