#include "checkpoint/module_names.h"

#include <algorithm>
#include <cstdint>

#include "recipe/decoder_tensors.h"

namespace marlin {
namespace {

struct NameRule {
  Producer producer;
  std::string_view from;
  std::string_view to;
};

// The part of a name that a producer changes.
constexpr NameRule kRules[] = {
    {Producer::kMlx, ".switch_mlp.", ".experts.*."},
    {Producer::kMlx, ".experts.gate_proj", ".experts.*.gate_proj"},
    {Producer::kMlx, ".experts.up_proj", ".experts.*.up_proj"},
    {Producer::kMlx, ".experts.down_proj", ".experts.*.down_proj"},
};

}  // namespace

std::string PlainWeightName(Producer producer, std::string_view base, bool stacked) {
  std::string name(base);
  for (const NameRule& rule : kRules) {
    if (rule.producer != producer || !stacked) continue;
    const size_t at = name.find(rule.from);
    if (at == std::string::npos) continue;
    name.replace(at, rule.from.size(), rule.to);
    return name + ".weight";
  }
  // Fused experts have no suffix in unquantized checkpoints.
  return stacked ? name : name + ".weight";
}

std::string ExpertNameInStyle(const ExpertStyle& style, std::string_view name) {
  constexpr std::string_view kExperts = ".experts.*.";
  const size_t at = name.find(kExperts);
  if (style.stacked || at == std::string_view::npos) return std::string(name);
  const size_t block = name.rfind('.', at - 1) + 1;
  const std::string_view matrix = name.substr(at + kExperts.size());
  const size_t end = std::min(matrix.find('.'), matrix.size());
  const ExpertProjections& own = style.short_names ? kShortProjections : kUsualProjections;
  const ExpertProjections& other = style.short_names ? kUsualProjections : kShortProjections;
  std::string renamed(name.substr(0, block));
  renamed += style.block;
  renamed += kExperts;
  for (size_t i = 0; i < own.size(); ++i) {
    if (matrix.substr(0, end) == other[i]) return renamed.append(own[i]).append(matrix.substr(end));
  }
  return renamed.append(matrix);
}

}  // namespace marlin
