#include "checkpoint/module_names.h"

#include <cstdint>

namespace marlin {
namespace {

struct NameRule {
  Producer producer;
  std::string_view from;
  std::string_view to;
};

// The part of a name that a producer changes. The names of blocks (mlp, block_sparse_moe) and of
// matrices (gate_proj, w1) differ too, but a model's loader knows them all.
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

}  // namespace marlin
