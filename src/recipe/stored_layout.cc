#include "recipe/stored_layout.h"

namespace marlin {
namespace {

struct InOutRule {
  std::string_view model_type;
  std::string_view suffix;
};
constexpr InOutRule kInOutRules[] = {
    {"gpt2", "c_attn.weight"},
    {"gpt2", "c_proj.weight"},
    {"gpt2", "c_fc.weight"},
    {"gpt_oss", "experts.gate_up_proj"},
    {"gpt_oss", "experts.down_proj"},
    {"llama4", "experts.gate_up_proj"},
    {"llama4", "experts.down_proj"},
    {"llama4_text", "experts.gate_up_proj"},
    {"llama4_text", "experts.down_proj"},
    // As published; transformers 5 writes [experts, out, in].
    {"qwen3_vl_moe_text", "experts.gate_up_proj"},
    {"qwen3_vl_moe_text", "experts.down_proj"},
    {"openai-gpt", "c_attn.weight"},
};

}  // namespace

bool IsStoredInOut(std::string_view model_type, std::string_view tensor_name) {
  for (const InOutRule& rule : kInOutRules) {
    if (model_type == rule.model_type && tensor_name.ends_with(rule.suffix)) return true;
  }
  return false;
}

std::optional<std::array<std::string, 2>> ExpertStacks(std::string_view tensor_name) {
  constexpr std::array<std::string_view, 2> kStacks = {"experts.gate_up_proj", "experts.down_proj"};
  for (const std::string_view stack : kStacks) {
    if (!tensor_name.ends_with(stack)) continue;
    const std::string block(tensor_name.substr(0, tensor_name.size() - stack.size()));
    return std::array{block + std::string(kStacks[0]), block + std::string(kStacks[1])};
  }
  return std::nullopt;
}

std::optional<bool> StacksAreInOut(const Shape& gate_up, const Shape& down) {
  if (gate_up.rank() != 3 || down.rank() != 3 || gate_up[0] != down[0]) return std::nullopt;
  if (gate_up[2] == down[1] && gate_up[1] == 2 * down[2]) return false;
  if (gate_up[1] == down[2] && gate_up[2] == 2 * down[1]) return true;
  return std::nullopt;
}

}  // namespace marlin
