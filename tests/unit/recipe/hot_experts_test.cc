// Choices by measured routing frequency.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "marlin/recipe.h"
#include "marlin/routing.h"

namespace marlin::hot_experts_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Layers 1 and 2 have four experts each.
RoutingFrequencies Frequencies() {
  return {"qwen3_moe", 10, 2, {{1, {2, 9, 0, 9}}, {2, {5, 5, 5, 5}}}};
}

std::string NameOf(int layer, int expert) {
  return "model.layers." + std::to_string(layer) + ".mlp.experts." + std::to_string(expert) +
         ".up_proj.weight";
}

std::string Chosen(const MixedPrecisionConfig& recipe, const std::string& name) {
  return recipe.Choose(name, {64, 192}).ToString();
}

TEST(HotExperts, AreTheMostFrequent) {
  const FormatChoice choice = *ParseFormatChoice("s8/g128");
  const HotExperts half = HotExperts::Of(Frequencies(), 0.5, choice);
  ASSERT_EQ(half.layers.size(), 2U);
  EXPECT_THAT(half.layers[0].hot, ElementsAre(1, 3));
  EXPECT_THAT(half.layers[1].hot, ElementsAre(0, 1));
  EXPECT_EQ(half.layers[0].experts, 4);
  EXPECT_TRUE(half.Contains(1, 3));
  EXPECT_FALSE(half.Contains(1, 0));
  EXPECT_FALSE(half.Contains(0, 1));
  EXPECT_FALSE(half.Contains(3, 1));
  EXPECT_THAT(HotExperts::Of(Frequencies(), 0.001, choice).layers[0].hot, ElementsAre(1));
  EXPECT_THAT(HotExperts::Of(Frequencies(), 1.0, choice).layers[0].hot, ElementsAre(0, 1, 2, 3));
}

/// A directory with a file of frequencies.
class HotExpertsFile : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directories(directory_);
    std::ofstream(directory_ + "/routing.json") << Frequencies().ToJson();
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  Result<MixedPrecisionConfig> Read(const std::string& text) const {
    std::ofstream(directory_ + "/recipe.json") << text;
    return MixedPrecisionConfig::FromFile(directory_ + "/recipe.json");
  }

  const std::string directory_ = ::testing::TempDir() + "hot_experts_test";
};

TEST_F(HotExpertsFile, GivesAChoice) {
  const auto recipe = Read(R"({"base": "default_moe",
      "hot_experts": {"frequencies": "routing.json", "fraction": 0.5, "choice": "s8/g128"},
      "overrides": [{"glob": "*.layers.2.mlp.experts.1.*", "choice": "bf16"}]})");
  ASSERT_TRUE(recipe.ok()) << recipe.status().message();
  EXPECT_EQ(Chosen(*recipe, NameOf(1, 1)), "s8/g128");
  EXPECT_EQ(Chosen(*recipe, NameOf(1, 3)), "s8/g128");
  EXPECT_EQ(Chosen(*recipe, NameOf(1, 0)), "fp4_e2m1/g128");
  EXPECT_EQ(Chosen(*recipe, NameOf(2, 0)), "s8/g128");
  EXPECT_EQ(Chosen(*recipe, NameOf(2, 1)), "bf16");
  EXPECT_EQ(Chosen(*recipe, "model.layers.1.mlp.shared_experts.up_proj.weight"), "fp4_e2m1/g64");
  // The document stands alone.
  const auto again = MixedPrecisionConfig::FromJson(recipe->ToJson());
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->ToJson(), recipe->ToJson());
  EXPECT_EQ(*again->hot_experts(), *recipe->hot_experts());
}

TEST_F(HotExpertsFile, ErrorsNameTheKey) {
  struct Bad {
    const char* rule;
    const char* says;
  };
  for (const Bad& bad : {
           Bad{"3", "hot_experts: expected an object"},
           Bad{"{}", "hot_experts: the key 'choice' is missing"},
           Bad{R"({"choice": "s9"})", "hot_experts.choice"},
           Bad{R"({"choice": "bf16"})", "expected 'frequencies' and 'fraction', or 'layers'"},
           Bad{R"({"choice": "bf16", "frequencies": "routing.json"})", "fraction: expected"},
           Bad{R"({"choice": "bf16", "frequencies": "routing.json", "fraction": 0})", "above 0"},
           Bad{R"({"choice": "bf16", "frequencies": "routing.json", "fraction": 1.5})", "most 1"},
           Bad{R"({"choice": "bf16", "frequencies": "routing.json", "count": 3})",
               "unknown key 'count'"},
           Bad{R"({"choice": "bf16", "frequencies": 3, "fraction": 1})", "frequencies: expected"},
           Bad{R"({"choice": "bf16", "layers": [3]})", "layers: expected objects"},
           Bad{R"({"choice": "bf16", "layers": [], "model_type": 3})", "hot_experts.model_type"},
           Bad{R"({"choice": "bf16", "layers": [{"layer": 0, "experts": -1, "hot": []}]})",
               "expected whole numbers"},
           Bad{R"({"choice": "bf16", "layers": [{"layer": 0, "experts": 4, "hot": [4]}]})",
               "expected ascending numbers below 4"},
           Bad{R"({"choice": "bf16", "layers": [{"layer": 0, "experts": 4, "hot": [2, 1]}]})",
               "expected ascending numbers"},
           Bad{R"({"choice": "bf16", "layers": [{"layer": 1, "experts": 4, "hot": []},
                                                {"layer": 1, "experts": 4, "hot": []}]})",
               "layers in ascending order"},
       }) {
    const auto recipe = Read(std::string(R"({"hot_experts": )") + bad.rule + "}");
    EXPECT_EQ(recipe.status().code(), Code::kInvalidArgument) << bad.rule;
    EXPECT_THAT(std::string(recipe.status().message()), HasSubstr(bad.says)) << bad.rule;
  }
  const auto absent =
      Read(R"({"hot_experts": {"choice": "bf16", "frequencies": "absent.json", "fraction": 1}})");
  EXPECT_EQ(absent.status().code(), Code::kIo);
  EXPECT_THAT(std::string(absent.status().message()), HasSubstr("absent.json"));
}

TEST(HotExperts, FitOneModelType) {
  MixedPrecisionConfig recipe = MixedPrecisionConfig::DefaultMoe();
  HotExperts hot = HotExperts::Of(Frequencies(), 0.5, *ParseFormatChoice("bf16"));
  EXPECT_EQ(hot.model_type, "qwen3_moe");
  std::vector<std::string> names;
  for (const int layer : {1, 2}) {
    for (int expert = 0; expert < 4; ++expert) names.push_back(NameOf(layer, expert));
  }
  std::vector<TensorShape> tensors;
  for (const std::string& name : names) tensors.push_back({name, {64, 192}});
  recipe.set_hot_experts(hot);
  EXPECT_TRUE(recipe.CheckHotExperts("qwen3_moe", tensors).ok());
  const Status other = recipe.CheckHotExperts("glm4_moe", tensors);
  EXPECT_EQ(other.code(), Code::kInvalidArgument);
  EXPECT_EQ(other.message(),
            "recipe: hot_experts: frequencies of another model: of model_type 'qwen3_moe', not "
            "'glm4_moe'");
  // Where one of the types is unknown, the layers decide alone.
  EXPECT_TRUE(recipe.CheckHotExperts("", tensors).ok());
  hot.model_type.clear();
  recipe.set_hot_experts(hot);
  EXPECT_TRUE(recipe.CheckHotExperts("glm4_moe", tensors).ok());
}

TEST(HotExperts, FitOneModel) {
  MixedPrecisionConfig recipe = MixedPrecisionConfig::DefaultMoe();
  recipe.set_hot_experts(HotExperts::Of(Frequencies(), 0.5, *ParseFormatChoice("bf16")));
  std::vector<std::string> names;
  const auto check = [&](std::vector<std::pair<int, int>> experts_of_layers) {
    names.clear();
    for (const auto& [layer, experts] : experts_of_layers) {
      for (int expert = 0; expert < experts; ++expert) names.push_back(NameOf(layer, expert));
    }
    std::vector<TensorShape> tensors;
    for (const std::string& name : names) tensors.push_back({name, {64, 192}});
    return recipe.CheckHotExperts("qwen3_moe", tensors);
  };
  const auto message = [](const Status& status) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_TRUE(check({{1, 4}, {2, 4}}).ok());
  EXPECT_THAT(message(check({{1, 4}, {2, 8}})),
              HasSubstr("frequencies of another model: layer 2 has 8 experts, not 4"));
  EXPECT_THAT(message(check({{1, 4}})), HasSubstr("layer 2 has 0 experts, not 4"));
  EXPECT_THAT(message(check({{0, 4}, {1, 4}, {2, 4}})), HasSubstr("layer 0 has 4 experts, not 0"));
  const std::vector<TensorShape> fused = {
      {"model.layers.1.mlp.experts.gate_up_proj", {4, 64, 192}}};
  EXPECT_THAT(message(recipe.CheckHotExperts("qwen3_moe", fused)),
              HasSubstr("experts.gate_up_proj\" holds several experts, which share one choice"));
}

}  // namespace
}  // namespace marlin::hot_experts_test
