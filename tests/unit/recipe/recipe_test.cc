#include "marlin/recipe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>

namespace marlin::recipe_test {
namespace {

using ::testing::HasSubstr;

constexpr const char* kExpert = "model.layers.1.mlp.experts.3.up_proj.weight";
constexpr const char* kShared = "model.layers.1.mlp.shared_experts.up_proj.weight";
constexpr const char* kRouter = "model.layers.1.mlp.gate.weight";
constexpr const char* kQuery = "model.layers.1.self_attn.q_proj.weight";
constexpr const char* kEmbedding = "model.embed_tokens.weight";

std::string Chosen(const MixedPrecisionConfig& recipe, const char* name) {
  return recipe.Choose(name, {64, 192}).ToString();
}

TEST(FormatChoice, RoundTrips) {
  for (const char* text :
       {"keep", "bf16", "fp16", "fp4_e2m1/g128", "s4/g64", "nf3/gK", "fp4_e2m1/g32/e8m0",
        "int3/g64/sym", "u4/g64/frac", "int2/g32/bf16/frac", "int2/g16/bf16/sym",
        "fp8_e4m3/g128/fp32", "s4/g64/2:4", "fp4_e2m1/g16/e4m3/2:4", "u4/g64/h128",
        "fp4_e2m1/g32/e8m0/ceil", "fp4_e2m1/g32/e8m0/nearest/h2", "s4/g64/2:4/h32768"}) {
    const Result<FormatChoice> choice = ParseFormatChoice(text);
    ASSERT_TRUE(choice.ok()) << text << ": " << choice.status().message();
    EXPECT_EQ(choice->ToString(), text);
  }
}

TEST(FormatChoice, ZeroPointsExcludeSparsity) {
  const Status status = ParseFormatChoice("u4/g64/2:4").status();
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("in u4 the code of weight 0 depends"));
}

TEST(Recipe, AnotherSparsityIsThatOfEveryQuantizedClassButTheEnds) {
  const auto sparse = MixedPrecisionConfig::DefaultMoe().WithSparsity(Sparsity::k24);
  ASSERT_TRUE(sparse.ok());
  for (const auto& [layer_class, choice] : sparse->classes()) {
    const Sparsity expected = IsModelEnd(layer_class) ? Sparsity::kDense : Sparsity::k24;
    EXPECT_EQ(choice.sparsity, expected) << LayerClassName(layer_class);
  }
  const auto again = MixedPrecisionConfig::FromJson(sparse->ToJson());
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->classes(), sparse->classes());
  const auto dense = sparse->WithSparsity(Sparsity::kDense);
  ASSERT_TRUE(dense.ok());
  EXPECT_EQ(dense->classes(), MixedPrecisionConfig::DefaultMoe().classes());
  const Status status = MixedPrecisionConfig::AggressiveMoe().WithSparsity(Sparsity::k24).status();
  EXPECT_THAT(status.message(), HasSubstr("moe_expert: format choice 'nf3/g64/2:4': "));
}

TEST(FormatChoice, RefusesWhatIsWrongByName) {
  struct Case {
    const char* text;
    const char* message;
  };
  for (const Case& wrong : {
           Case{"", "the format's name is missing"},
           Case{"fp5/g64", "unknown name 'fp5'"},
           Case{"s4", "the group size is missing"},
           Case{"s4/g0", "group size 0"},
           Case{"s4/g-1", "multiple of 16, got -1"},
           Case{"s4/g7", "multiple of 16, got 7"},
           Case{"s4/g24", "multiple of 16, got 24"},
           Case{"s4/gx", "'gx' is not a group size"},
           Case{"s4/g99999999999999999999", "is not a group size"},
           Case{"s4/g64/g64", "unexpected part 'g64'"},
           Case{"s4/g64/fp64", "unexpected part 'fp64'"},
           Case{"s4/g64/", "unexpected part ''"},
           Case{"u4/g64/sym", "needs zero points"},
           Case{"s4/g64/frac", "s4 has no zero points that could be fractional"},
           Case{"int3/g64/sym/frac", "no zero points that could be fractional"},
           Case{"u4/g64/frac/frac", "unexpected part"},
           Case{"bf16/g64", "bf16 has no groups"},
           Case{"s4/g64/2:4/2:4", "unexpected part '2:4'"},
           Case{"s4/g64/h48", "'h48' is no size of Hadamard blocks; expected hN, a power of two"},
           Case{"s4/g64/h", "'h' is no size of Hadamard blocks"},
           Case{"s4/g64/h65536", "a power of two from 2 to 32768"},
           Case{"s4/g64/h64/h64", "unexpected part 'h64'"},
           Case{"s4/g64/ceil", "'ceil' rounds scales of type e8m0, these are fp16"},
           Case{"fp4_e2m1/g32/e8m0/ceil/floor", "unexpected part 'floor'"},
           Case{"s4/g64/4:8", "unexpected part '4:8'"},
           Case{"nf3/g64/2:4", "2:4 needs 4 or 8 bits, nf3 has 3"},
       }) {
    const Status status = ParseFormatChoice(wrong.text).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << wrong.text;
    EXPECT_THAT(status.message(), HasSubstr(wrong.message)) << wrong.text;
  }
}

TEST(Recipe, PresetsAreTheDocumentedOnes) {
  const MixedPrecisionConfig dense = MixedPrecisionConfig::DefaultDense();
  EXPECT_EQ(Chosen(dense, kQuery), "fp4_e2m1/g128");
  EXPECT_EQ(Chosen(dense, "model.layers.0.mlp.down_proj.weight"), "fp4_e2m1/g128");

  const MixedPrecisionConfig moe = MixedPrecisionConfig::DefaultMoe();
  EXPECT_EQ(Chosen(moe, kRouter), "keep");
  EXPECT_EQ(Chosen(moe, kShared), "fp4_e2m1/g64");
  EXPECT_EQ(Chosen(moe, kExpert), "fp4_e2m1/g128");
  EXPECT_EQ(Chosen(moe, kQuery), "fp4_e2m1/g64");

  const MixedPrecisionConfig aggressive = MixedPrecisionConfig::AggressiveMoe();
  EXPECT_EQ(Chosen(aggressive, kRouter), "keep");
  EXPECT_EQ(Chosen(aggressive, kShared), "s4/g64");
  EXPECT_EQ(Chosen(aggressive, kExpert), "nf3/g64");

  const auto uniform = MixedPrecisionConfig::FromNameOrFile("uniform:nf4/g32");
  ASSERT_TRUE(uniform.ok());
  EXPECT_EQ(Chosen(*uniform, kExpert), "nf4/g32");
  EXPECT_EQ(Chosen(*uniform, kQuery), "nf4/g32");
  for (const auto& recipe : {dense, moe, aggressive}) {
    EXPECT_EQ(Chosen(recipe, kEmbedding), "s8/g64");
    EXPECT_EQ(Chosen(recipe, "lm_head.weight"), "int6/g64");
  }
  EXPECT_EQ(Chosen(*uniform, kEmbedding), "keep");
  EXPECT_EQ(Chosen(*uniform, "lm_head.weight"), "keep");
  for (const auto& recipe : {dense, moe, aggressive, *uniform}) {
    EXPECT_EQ(Chosen(recipe, kRouter), "keep");
    EXPECT_EQ(Chosen(recipe, "model.layers.61.eh_proj.weight"), "keep");
    EXPECT_EQ(recipe.Choose("model.norm.weight", {64}).ToString(), "keep");
  }
}

TEST(Recipe, LaterOverridesWin) {
  MixedPrecisionConfig recipe = MixedPrecisionConfig::DefaultMoe();
  const auto add = [&](const char* pattern, bool is_regex, const char* choice) {
    return recipe.AddOverride({pattern, is_regex, *ParseFormatChoice(choice)});
  };
  ASSERT_TRUE(add("*.experts.*", false, "nf3/g64").ok());
  ASSERT_TRUE(add(R"(experts\.[37]\.up_proj)", true, "s8/g32").ok());
  ASSERT_TRUE(add("model.embed_tokens.weight", false, "s8/gK").ok());
  EXPECT_EQ(Chosen(recipe, kExpert), "s8/g32");
  EXPECT_EQ(Chosen(recipe, "model.layers.1.mlp.experts.4.up_proj.weight"), "nf3/g64");
  EXPECT_EQ(Chosen(recipe, kEmbedding), "s8/gK");
  // A pattern that matches everything still excludes vectors and biases.
  ASSERT_TRUE(add(".*", true, "s4/g64").ok());
  EXPECT_EQ(recipe.Choose("model.norm.weight", {64}).ToString(), "keep");
  EXPECT_EQ(recipe.Choose("a.experts.gate_up_proj_bias", {8, 64}).ToString(), "keep");
  // A glob is anchored, a regular expression is not.
  EXPECT_EQ(Chosen(recipe, kRouter), "s4/g64");
  ASSERT_TRUE(add("gate.weight", false, "s8/g16").ok());
  EXPECT_EQ(Chosen(recipe, kRouter), "s4/g64");
}

TEST(Recipe, RefusesMalformedPatterns) {
  MixedPrecisionConfig recipe;
  const Status regex = recipe.AddOverride({"experts.(", true, {}});
  EXPECT_EQ(regex.code(), Code::kInvalidArgument);
  EXPECT_THAT(regex.message(), HasSubstr("'experts.('"));
  EXPECT_EQ(recipe.AddOverride({"", false, {}}).code(), Code::kInvalidArgument);
  EXPECT_TRUE(recipe.overrides().empty());
}

TEST(Recipe, JsonRoundTrips) {
  const auto recipe = MixedPrecisionConfig::FromJson(R"({
    "name": "mine", "base": "aggressive_moe",
    "classes": {"lm_head": "s8/g128", "moe_shared_expert": "keep"},
    "overrides": [{"glob": "*.layers.0.*", "choice": "keep"},
                  {"regex": "experts\\.0\\.", "choice": "fp4_e2m1/g32/e8m0"}]})");
  ASSERT_TRUE(recipe.ok()) << recipe.status().message();
  EXPECT_EQ(recipe->name(), "mine");
  EXPECT_EQ(Chosen(*recipe, kShared), "keep");
  EXPECT_EQ(Chosen(*recipe, kExpert), "nf3/g64");
  EXPECT_EQ(Chosen(*recipe, "lm_head.weight"), "s8/g128");
  EXPECT_EQ(Chosen(*recipe, "model.layers.0.mlp.up_proj.weight"), "keep");
  EXPECT_EQ(Chosen(*recipe, "model.layers.1.mlp.experts.0.up_proj.weight"), "fp4_e2m1/g32/e8m0");

  const auto again = MixedPrecisionConfig::FromJson(recipe->ToJson());
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->ToJson(), recipe->ToJson());
  EXPECT_EQ(again->classes(), recipe->classes());
}

TEST(Recipe, RefusesWrongJsonByName) {
  struct Case {
    const char* text;
    const char* message;
  };
  for (const Case& wrong : {
           Case{"", "malformed JSON"},
           Case{"[]", "expected a JSON object"},
           Case{R"({"clases": {}})", "unknown key 'clases'"},
           Case{R"({"name": 7})", "name: expected a string, got number"},
           Case{R"({"base": "default"})", "'default' is not a preset"},
           Case{R"({"classes": []})", "classes: expected an object"},
           Case{R"({"classes": {"expert": "keep"}})", "unknown name 'expert'"},
           Case{R"({"classes": {"moe_expert": 4}})", "classes.moe_expert: expected a string"},
           Case{R"({"classes": {"moe_expert": "s4/g7"}})", "got 7"},
           Case{R"({"classes": {"moe_expert": "keep", "moe_expert": "s4/g64"}})",
                "duplicate key \"moe_expert\""},
           Case{R"({"overrides": {}})", "overrides: expected an array"},
           Case{R"({"overrides": [3]})", "overrides[0]: expected an object"},
           Case{R"({"overrides": [{"glob": "*", "format": "keep"}]})", "unknown key 'format'"},
           Case{R"({"overrides": [{"choice": "keep"}]})", "exactly one of 'glob' and 'regex'"},
           Case{R"({"overrides": [{"glob": "*"}]})", "'choice' is missing"},
           Case{R"({"overrides": [{"regex": "(", "choice": "keep"}]})", "regular expression"},
       }) {
    const Status status = MixedPrecisionConfig::FromJson(wrong.text).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << wrong.text;
    EXPECT_THAT(status.message(), HasSubstr(wrong.message)) << wrong.text;
    EXPECT_EQ(status.message().find('\n'), std::string::npos) << wrong.text;
  }
}

TEST(Recipe, DeepJsonIsRefusedNotFatal) {
  const std::string deep = "{\"name\":" + std::string(1 << 18, '[');
  EXPECT_EQ(MixedPrecisionConfig::FromJson(deep).status().code(), Code::kInvalidArgument);
}

TEST(Recipe, NamesAndFiles) {
  EXPECT_TRUE(MixedPrecisionConfig::FromNameOrFile("default_moe").ok());
  const Status unknown = MixedPrecisionConfig::FromNameOrFile("default_mo").status();
  EXPECT_EQ(unknown.code(), Code::kInvalidArgument);
  EXPECT_THAT(unknown.message(), HasSubstr("'default_mo'"));
  EXPECT_EQ(MixedPrecisionConfig::FromNameOrFile("uniform:s4").status().code(),
            Code::kInvalidArgument);
  EXPECT_EQ(MixedPrecisionConfig::FromNameOrFile("absent/recipe.json").status().code(), Code::kIo);

  const std::string path = ::testing::TempDir() + "recipe_test.json";
  std::ofstream(path) << R"({"classes": {"moe_expert": "nf2/g64"}})";
  const auto recipe = MixedPrecisionConfig::FromNameOrFile(path);
  ASSERT_TRUE(recipe.ok()) << recipe.status().message();
  EXPECT_EQ(Chosen(*recipe, kExpert), "nf2/g64");
  EXPECT_EQ(Chosen(*recipe, kQuery), "keep");
  std::ofstream(path) << "{";
  EXPECT_THAT(MixedPrecisionConfig::FromFile(path).status().message(), HasSubstr(path));
  std::remove(path.c_str());
  EXPECT_EQ(MixedPrecisionConfig::FromFile(::testing::TempDir()).status().code(), Code::kIo);
}

}  // namespace
}  // namespace marlin::recipe_test
