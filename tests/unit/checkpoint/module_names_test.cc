#include "checkpoint/module_names.h"

#include <gtest/gtest.h>

namespace marlin::module_names_test {
namespace {

std::string Named(const std::string& type, const std::string& name) {
  const Result<const Family*> family = FindFamily(type);
  EXPECT_TRUE(family.ok());
  return ExpertNameInStyle(*(*family)->experts, name);
}

TEST(ModuleNames, ExpertsAreNamedAsInTheirType) {
  const std::string layer = "model.layers.3.";
  const std::string usual = layer + "mlp.experts.*.";
  const std::string mixtral = layer + "block_sparse_moe.experts.*.";
  EXPECT_EQ(Named("mixtral", usual + "gate_proj.weight"), mixtral + "w1.weight");
  EXPECT_EQ(Named("mixtral", mixtral + "up_proj.weight"), mixtral + "w3.weight");
  EXPECT_EQ(Named("mixtral", mixtral + "down_proj"), mixtral + "w2");
  EXPECT_EQ(Named("mixtral", mixtral + "w2.weight"), mixtral + "w2.weight");
  EXPECT_EQ(Named("qwen3_moe", mixtral + "w1.weight"), usual + "gate_proj.weight");
  EXPECT_EQ(Named("qwen3_moe", usual + "gate_proj.weight"), usual + "gate_proj.weight");
  // No experts, or all of them in one tensor.
  EXPECT_EQ(Named("mixtral", layer + "self_attn.q_proj.weight"), layer + "self_attn.q_proj.weight");
  EXPECT_EQ(Named("gpt_oss", usual + "gate_proj.weight"), usual + "gate_proj.weight");
}

TEST(ModuleNames, NamesOfMlxAreThoseOfUnquantizedCheckpoints) {
  EXPECT_EQ(PlainWeightName(Producer::kMlx, "a.switch_mlp.gate_proj", true),
            "a.experts.*.gate_proj.weight");
  EXPECT_EQ(PlainWeightName(Producer::kMlx, "a.q_proj", false), "a.q_proj.weight");
}

}  // namespace
}  // namespace marlin::module_names_test
