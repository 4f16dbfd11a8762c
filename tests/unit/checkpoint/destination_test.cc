// Recipes for the programs that load exported checkpoints: what is said to load is written, and
// docs/howto/where-recipes-load.md has the same table.
#include "marlin/destination.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../../source_directory.h"
#include "marlin/format.h"
#include "test_files.h"

namespace marlin::destination_test {
namespace {

using testing::RandomBf16;
using testing::TestTensor;

constexpr const char* kDense = R"({"model_type": "qwen3", "hidden_size": 256, "head_dim": 64,
  "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1, "vocab_size": 32,
  "intermediate_size": 256, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
  "rope_theta": 10000.0, "tie_word_embeddings": true, "hidden_act": "silu"})";
constexpr const char* kMoe = R"({"model_type": "qwen3_moe", "hidden_size": 256, "head_dim": 64,
  "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1, "vocab_size": 32,
  "intermediate_size": 256, "moe_intermediate_size": 256, "num_experts": 2,
  "num_experts_per_tok": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
  "rope_theta": 10000.0, "tie_word_embeddings": true, "hidden_act": "silu"})";

/// A model of one layer; `k` is the number of inputs of down_proj.
class Source {
 public:
  Source(const std::string& config, bool experts, int64_t k = 256,
         const std::string& query = "self_attn.q_proj") {
    std::filesystem::create_directory(path());
    std::vector<TestTensor> tensors = {
        RandomBf16("model.embed_tokens.weight", {32, 256}, 1),
        RandomBf16("model.layers.0." + query + ".weight", {256, 256}, 2)};
    if (experts) {
      for (int e = 0; e < 2; ++e) {
        tensors.push_back(RandomBf16(
            fmt::format("model.layers.0.mlp.experts.{}.down_proj.weight", e), {256, k}, 3));
      }
    } else {
      tensors.push_back(RandomBf16("model.layers.0.mlp.down_proj.weight", {256, k}, 3));
    }
    testing::WriteFile(path() + "/model.safetensors", testing::BuildSafetensors(tensors));
    testing::WriteFile(path() + "/config.json", config);
    checkpoint_.emplace(*Checkpoint::Open(path()));
  }
  std::string path() const { return directory_ / "model"; }
  std::string Output(const std::string& name) const { return directory_ / name; }
  const Checkpoint& checkpoint() const { return *checkpoint_; }

 private:
  testing::TemporaryDirectory directory_{testing::MemoryDirectory()};
  std::optional<Checkpoint> checkpoint_;
};

/// Every choice of a quantized format that a recipe can name, and that fits k = 256.
std::vector<FormatChoice> AllChoices(const FormatInfo& format, bool symmetric) {
  std::vector<FormatChoice> choices;
  for (const ScaleType type :
       {ScaleType::kF16, ScaleType::kBf16, ScaleType::kF32, ScaleType::kE8M0, ScaleType::kE4M3}) {
    for (const char* group : {"16", "32", "64", "128", "K"}) {
      const Result<FormatChoice> choice = ParseFormatChoice(fmt::format(
          "{}/g{}/{}{}", format.name, group, ScaleTypeName(type), symmetric ? "/sym" : ""));
      if (choice.ok()) choices.push_back(*choice);
    }
  }
  return choices;
}

bool Loads(const Destination& destination, const Source& source, const FormatChoice& choice) {
  const Result<MixedPrecisionConfig> recipe = MixedPrecisionConfig::Uniform(choice.ToString());
  return recipe.ok() && CheckRecipeFor(destination, source.checkpoint(), *recipe).ok();
}

/// "32, 64: fp16, bf16": the groups and scales with which a destination loads a format.
std::string Cell(const Destination& destination, const Source& source,
                 const std::vector<FormatChoice>& choices) {
  std::map<ScaleType, std::string> groups;
  std::vector<ScaleType> order;
  for (const FormatChoice& choice : choices) {
    if (!Loads(destination, source, choice)) continue;
    std::string& text = groups[choice.scale_type];
    if (text.empty()) order.push_back(choice.scale_type);
    text += (text.empty() ? "" : ", ") +
            (choice.group_size == 0 ? std::string("K") : std::to_string(choice.group_size));
  }
  std::string cell;
  for (size_t i = 0; i < order.size(); ++i) {
    const std::string& text = groups[order[i]];
    if (i > 0 && groups[order[i - 1]] == text) continue;
    cell += fmt::format("{}{}:", cell.empty() ? "" : "; ", text);
    for (size_t j = i; j < order.size() && groups[order[j]] == text; ++j) {
      cell += fmt::format("{} {}", j == i ? "" : ",", ScaleTypeName(order[j]));
    }
  }
  return cell;
}

std::string PageTable() {
  const Source dense(kDense, false);
  const Source moe(kMoe, true);
  std::string header = "| format |";
  std::string rule = "|---|";
  for (const Destination& destination : AllDestinations()) {
    header += fmt::format(" {} |", destination.name);
    rule += "---|";
  }
  // Formats with the same cells share a row, in the order of the first.
  std::vector<std::pair<std::string, std::string>> rows;
  for (const FormatInfo& format : AllFormats()) {
    if (!format.quantized) continue;
    for (const bool symmetric : {false, true}) {
      if (symmetric && format.zero_point != ZeroPoint::kOptional) continue;
      const std::vector<FormatChoice> choices = AllChoices(format, symmetric);
      const std::string name = fmt::format("`{}{}`", format.name, symmetric ? "/sym" : "");
      std::string row;
      bool any = false;
      for (const Destination& destination : AllDestinations()) {
        std::string cell = Cell(destination, dense, choices);
        const std::string experts = Cell(destination, moe, choices);
        if (!cell.empty() && experts != cell) {
          cell += experts.empty() ? "; not experts" : fmt::format("; experts {}", experts);
        }
        any = any || !cell.empty();
        row += fmt::format(" {} |", cell.empty() ? "no" : cell);
      }
      if (!any) continue;
      const auto same = std::ranges::find(rows, row, &std::pair<std::string, std::string>::second);
      if (same == rows.end()) {
        rows.emplace_back(name, row);
      } else {
        same->first += ", " + name;
      }
    }
  }
  std::string table = header + "\n" + rule + "\n";
  for (const auto& [names, cells] : rows) table += fmt::format("| {} |{}\n", names, cells);
  return table;
}

TEST(Destination, PageHasTheTable) {
  const std::string page =
      testing::ReadFile(SourceDirectory() + "/docs/howto/where-recipes-load.md");
  const std::string table = PageTable();
  EXPECT_NE(page.find(table), std::string::npos) << table;
}

TEST(Destination, WhatLoadsIsWritten) {
  const Source source(kMoe, true);
  int written = 0;
  for (const Destination& destination : AllDestinations()) {
    for (const FormatInfo& format : AllFormats()) {
      for (const bool symmetric : {false, true}) {
        if (!format.quantized) continue;
        for (const FormatChoice& choice : AllChoices(format, symmetric)) {
          if (!Loads(destination, source, choice)) continue;
          QuantizeCheckpointOptions options;
          options.recipe = *MixedPrecisionConfig::Uniform(choice.ToString());
          options.overwrite = true;
          ASSERT_TRUE(QuantizeCheckpoint(source.path(), source.Output("q"), options).ok());
          ConvertCheckpointOptions convert;
          convert.target = destination.target;
          convert.overwrite = true;
          const Result<ConvertCheckpointReport> report = ConvertCheckpoint(
              source.Output("q"),
              source.Output(std::string(destination.name) + std::string(destination.suffix)),
              convert);
          EXPECT_TRUE(report.ok())
              << destination.name << " " << choice.ToString() << ": " << report.status().message();
          ++written;
        }
      }
    }
  }
  EXPECT_GT(written, 40);
}

TEST(Destination, RecipeTakesSmallerGroupsWhereItsOwnDoNotDivide) {
  for (const bool experts : {false, true}) {
    const Source source(experts ? kMoe : kDense, experts, 288);
    const std::string down = experts ? "model.layers.0.mlp.experts.1.down_proj.weight"
                                     : "model.layers.0.mlp.down_proj.weight";
    for (const Destination& destination : AllDestinations()) {
      const Result<MixedPrecisionConfig> recipe = RecipeFor(destination, source.checkpoint());
      ASSERT_TRUE(recipe.ok()) << recipe.status().message();
      EXPECT_EQ(recipe->name(), "for " + std::string(destination.name));
      const FormatChoice usual =
          recipe->Choose("model.layers.0.self_attn.q_proj.weight", {256, 256});
      EXPECT_EQ(usual.group_size, ParseFormatChoice(destination.choice)->group_size);
      EXPECT_EQ(usual.scale_type, destination.source_scales ? ScaleType::kBf16 : ScaleType::kF16);
      EXPECT_EQ(recipe->Choose(down, {256, 288}).group_size, 32) << destination.name;
      EXPECT_TRUE(recipe->Choose("model.embed_tokens.weight", {32, 256}).keep);
    }
  }
}

TEST(Destination, RecipeKeepsWhatHasNoGroup) {
  const Source source(kDense, false, 296);
  for (const Destination& destination : AllDestinations()) {
    const Result<MixedPrecisionConfig> recipe = RecipeFor(destination, source.checkpoint());
    ASSERT_TRUE(recipe.ok()) << recipe.status().message();
    EXPECT_TRUE(recipe->Choose("model.layers.0.mlp.down_proj.weight", {256, 296}).keep);
  }
}

TEST(Destination, MlxKeepsWhatItQuantizesAgain) {
  const Source source(kDense, false, 256, "self_attn.kv_b_proj");
  const std::string name = "model.layers.0.self_attn.kv_b_proj.weight";
  EXPECT_TRUE(
      RecipeFor(*FindDestination("mlx-lm"), source.checkpoint())->Choose(name, {256, 256}).keep);
  EXPECT_FALSE(RecipeFor(*FindDestination("transformers"), source.checkpoint())
                   ->Choose(name, {256, 256})
                   .keep);
}

TEST(Destination, RefusesWhatIsNotLoadedAndSaysWhatIs) {
  const Source source(kMoe, true);
  const Status status = CheckRecipeFor(*FindDestination("vllm"), source.checkpoint(),
                                       *MixedPrecisionConfig::Uniform("nf4/g64"));
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_EQ(status.message(),
            source.path() +
                ": module \"model.layers.0.self_attn.q_proj.weight\": vllm does not load "
                "nf4 in groups of 64 with fp16 scales: its kernels for compressed-tensors take s4 "
                "and s8 with fp16 or bf16 scales, in groups of 32, 64 or 128 or one for all of k; "
                "without a recipe --for vllm takes s4/g128");
  const Status empty = CheckRecipeFor(*FindDestination("mlx-lm"), source.checkpoint(),
                                      *MixedPrecisionConfig::Uniform("keep"));
  EXPECT_NE(empty.message().find("loads none of its matrices"), std::string::npos);
  EXPECT_EQ(FindDestination("ollama").status().message(),
            "unknown destination 'ollama'; known: llama.cpp, mlx-lm, vllm, transformers");
}

TEST(Destination, RefusesAConfigBeforeQuantizing) {
  std::string config = kDense;
  config.replace(config.find("silu"), 4, "gelu");
  const Source source(config, false);
  for (const char* name : {"llama.cpp", "mlx-lm"}) {
    const Status status = RecipeFor(*FindDestination(name), source.checkpoint()).status();
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.message().find("hidden_act"), std::string::npos) << status.message();
  }
  EXPECT_TRUE(RecipeFor(*FindDestination("transformers"), source.checkpoint()).ok());
}

}  // namespace
}  // namespace marlin::destination_test
