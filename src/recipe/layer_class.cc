// Tensor name -> layer class, from one table.
#include <array>
#include <string>

#include "base/find_named.h"
#include "marlin/recipe.h"
#include "recipe/glob.h"

namespace marlin {
namespace {

constexpr std::array<std::string_view, kLayerClassCount> kClassNames = {
    "embedding", "lm_head",  "norm",       "attention_qkv",     "attention_out", "mlp_gate",
    "mlp_up",    "mlp_down", "moe_router", "moe_shared_expert", "moe_expert",    "other",
};

struct ClassRule {
  std::string_view glob;
  LayerClass layer_class;
};

// The first match wins, so nested names come first: experts before the projections inside them,
// norms before the blocks that they are named after. Names are matched with a leading dot, so that
// "*.wte.*" also matches "wte.weight".
constexpr ClassRule kRules[] = {
    // Vision and audio encoders next to the decoder name all their modules differently.
    {"*.visual.*", LayerClass::kOther},
    {"*.vision_*", LayerClass::kOther},
    {"*.audio_*", LayerClass::kOther},
    {"*.multi_modal_projector.*", LayerClass::kOther},
    {"*.mm_projector.*", LayerClass::kOther},
    {"*.embed_vision.*", LayerClass::kOther},
    {"*.embed_audio.*", LayerClass::kOther},
    {"*.connector.*", LayerClass::kOther},
    // llama "input_layernorm", gpt2 "ln_1", qwen3 "q_norm", deepseek_v3 "kv_a_layernorm", "enorm".
    {"*norm.weight", LayerClass::kNorm},
    {"*norm.bias", LayerClass::kNorm},
    {"*.norm?.*", LayerClass::kNorm},
    {"*.post_norm?.*", LayerClass::kNorm},
    {"*.pre_fc_norm_*", LayerClass::kNorm},
    {"*.layernorm*", LayerClass::kNorm},
    {"*.ln_*", LayerClass::kNorm},
    // qwen2_moe's gate of the shared expert acts as a router.
    {"*.shared_expert_gate.*", LayerClass::kMoeRouter},
    {"*.shared_expert.*", LayerClass::kMoeSharedExpert},
    {"*.shared_experts.*", LayerClass::kMoeSharedExpert},
    {"*.shared_mlp.*", LayerClass::kMoeSharedExpert},
    // An indexer of sparse attention is as sensitive as a router.
    {"*.indexer.*", LayerClass::kOther},
    {"*.experts.*", LayerClass::kMoeExpert},
    // The experts of granitemoe.
    {"*.block_sparse_moe.input_linear.*", LayerClass::kMoeExpert},
    {"*.block_sparse_moe.output_linear.*", LayerClass::kMoeExpert},
    {"*.mlp.gate.*", LayerClass::kMoeRouter},
    {"*.feed_forward.gate.*", LayerClass::kMoeRouter},
    {"*.mixer.gate.*", LayerClass::kMoeRouter},
    {"*.block_sparse_moe.gate.*", LayerClass::kMoeRouter},
    {"*.ffn.gate.*", LayerClass::kMoeRouter},
    {"*.router.*", LayerClass::kMoeRouter},
    {"*.embed_tokens.*", LayerClass::kEmbedding},
    {"*.embed_tokens_per_layer.*", LayerClass::kEmbedding},
    {"*.tok_embeddings.*", LayerClass::kEmbedding},
    {"*.word_embeddings.*", LayerClass::kEmbedding},
    {"*.embeddings.*", LayerClass::kEmbedding},
    {"*.embed_in.*", LayerClass::kEmbedding},
    {"*.wte.*", LayerClass::kEmbedding},
    {"*.wpe.*", LayerClass::kEmbedding},
    {"*.lm_head.*", LayerClass::kLmHead},
    {"*.embed_out.*", LayerClass::kLmHead},
    {"*.shared_head.head.*", LayerClass::kLmHead},
    {".output.weight", LayerClass::kLmHead},
    {"*.q_proj.*", LayerClass::kAttentionQkv},
    {"*.in_proj_qkv.*", LayerClass::kAttentionQkv},
    {"*.in_proj_qkvz.*", LayerClass::kAttentionQkv},
    {"*.in_proj_z.*", LayerClass::kAttentionQkv},
    {"*.in_proj.*", LayerClass::kAttentionQkv},
    {"*.k_proj.*", LayerClass::kAttentionQkv},
    {"*.v_proj.*", LayerClass::kAttentionQkv},
    {"*.qkv_proj.*", LayerClass::kAttentionQkv},
    {"*.q_a_proj.*", LayerClass::kAttentionQkv},
    {"*.q_b_proj.*", LayerClass::kAttentionQkv},
    {"*.kv_a_proj_with_mqa.*", LayerClass::kAttentionQkv},
    {"*.kv_b_proj.*", LayerClass::kAttentionQkv},
    {"*.query_key_value.*", LayerClass::kAttentionQkv},
    {"*.c_attn.*", LayerClass::kAttentionQkv},
    {"*.wqkv.*", LayerClass::kAttentionQkv},
    {"*.Wqkv.*", LayerClass::kAttentionQkv},
    {"*.wq.*", LayerClass::kAttentionQkv},
    {"*.wk.*", LayerClass::kAttentionQkv},
    {"*.wv.*", LayerClass::kAttentionQkv},
    {"*.o_proj.*", LayerClass::kAttentionOut},
    {"*.out_proj.*", LayerClass::kAttentionOut},
    {"*.attn.c_proj.*", LayerClass::kAttentionOut},
    {"*.self_attention.dense.*", LayerClass::kAttentionOut},
    {"*.attention.dense.*", LayerClass::kAttentionOut},
    {"*.wo.*", LayerClass::kAttentionOut},
    {"*.gate_up_proj.*", LayerClass::kMlpGate},
    {"*.gate_proj.*", LayerClass::kMlpGate},
    {"*.w1.*", LayerClass::kMlpGate},
    {"*.up_proj.*", LayerClass::kMlpUp},
    {"*.w3.*", LayerClass::kMlpUp},
    {"*.mlp.c_fc.*", LayerClass::kMlpUp},
    {"*.fc1.*", LayerClass::kMlpUp},
    {"*.dense_h_to_4h.*", LayerClass::kMlpUp},
    {"*.down_proj.*", LayerClass::kMlpDown},
    {"*.w2.*", LayerClass::kMlpDown},
    {"*.mlp.c_proj.*", LayerClass::kMlpDown},
    {"*.fc2.*", LayerClass::kMlpDown},
    {"*.dense_4h_to_h.*", LayerClass::kMlpDown},
};

// Expert stacks in one tensor have no ".weight" suffix: qwen3_moe and gpt_oss since transformers 5.
constexpr std::string_view kExpertStacks[] = {
    "gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3",
};

std::string_view LastSegment(std::string_view name) {
  const size_t dot = name.rfind('.');
  return dot == std::string_view::npos ? name : name.substr(dot + 1);
}

}  // namespace

std::string_view LayerClassName(LayerClass layer_class) {
  return kClassNames[static_cast<size_t>(layer_class)];
}

Result<LayerClass> ParseLayerClass(std::string_view name) {
  constexpr auto kClasses = [] {
    std::array<LayerClass, kLayerClassCount> classes{};
    for (size_t i = 0; i < classes.size(); ++i) classes[i] = static_cast<LayerClass>(i);
    return classes;
  }();
  return FindNamed("layer class", "name", name, kClasses, LayerClassName);
}

bool IsModelEnd(LayerClass layer_class) {
  return layer_class == LayerClass::kEmbedding || layer_class == LayerClass::kLmHead;
}

LayerClass ClassifyTensor(std::string_view name) {
  std::string dotted = ".";
  dotted += name;
  for (const ClassRule& rule : kRules) {
    if (GlobMatch(rule.glob, dotted)) return rule.layer_class;
  }
  return LayerClass::kOther;
}

bool IsWeightMatrix(std::string_view name, const Shape& shape) {
  for (int i = 0; i < shape.rank(); ++i) {
    if (shape[i] == 0) return false;
  }
  const std::string_view last = LastSegment(name);
  if (shape.rank() == 2) return last == "weight";
  if (shape.rank() != 3 || ClassifyTensor(name) != LayerClass::kMoeExpert) return false;
  for (std::string_view stack : kExpertStacks) {
    if (last == stack) return true;
  }
  return last == "weight";
}

}  // namespace marlin
