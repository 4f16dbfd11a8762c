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
    {"openai-gpt", "c_attn.weight"},
};

}  // namespace

bool IsStoredInOut(std::string_view model_type, std::string_view tensor_name) {
  for (const InOutRule& rule : kInOutRules) {
    if (model_type == rule.model_type && tensor_name.ends_with(rule.suffix)) return true;
  }
  return false;
}

}  // namespace marlin
