// Formats for a number of bits, and files of sensitivities.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "marlin/sensitivity.h"

namespace marlin::assign_formats_test {
namespace {

using ::testing::HasSubstr;

std::vector<FormatChoice> Choices(std::initializer_list<const char*> texts) {
  std::vector<FormatChoice> choices;
  for (const char* const text : texts) choices.push_back(*ParseFormatChoice(text));
  return choices;
}

/// Matrices [64, 64] in int2/g64/frac (2.5 bits), nf4/g64 (4.25) and s8/g64 (8.25).
Sensitivity Measured(const std::vector<std::vector<double>>& kl) {
  Sensitivity sensitivity;
  sensitivity.model_type = "qwen3";
  sensitivity.identity = "0123456789abcdef";
  sensitivity.tokens = 2048;
  sensitivity.formats = Choices({"int2/g64/frac", "nf4/g64", "s8/g64"});
  for (size_t i = 0; i < kl.size(); ++i) {
    sensitivity.matrices.push_back(
        {"model.layers." + std::to_string(i) + ".mlp.up_proj.weight", 1, 64, 64, kl[i]});
  }
  return sensitivity;
}

std::vector<TensorShape> Tensors(const Sensitivity& sensitivity) {
  std::vector<TensorShape> tensors;
  for (const Sensitivity::Matrix& matrix : sensitivity.matrices) {
    tensors.push_back({matrix.name, matrix.experts > 1 ? Shape{matrix.experts, matrix.n, matrix.k}
                                                       : Shape{matrix.n, matrix.k}});
  }
  return tensors;
}

std::vector<std::string> Chosen(const Sensitivity& sensitivity, const FormatAssignment& made) {
  std::vector<std::string> formats;
  for (const TensorShape& tensor : Tensors(sensitivity)) {
    formats.push_back(made.recipe.Choose(tensor.name, tensor.shape).ToString());
  }
  return formats;
}

TEST(AssignFormats, GivesTheBitsToWhatNeedsThem) {
  const Sensitivity sensitivity = Measured({{0.1, 0.01, 0}, {0.5, 0.1, 0}, {0.2, 0.01, 0}});
  const auto assign = [&](double target) {
    return *AssignFormats(sensitivity, Tensors(sensitivity), target);
  };
  using Formats = std::vector<std::string>;
  const std::string low = "int2/g64/frac";
  EXPECT_EQ(Chosen(sensitivity, assign(2.5)), (Formats{low, low, low}));
  EXPECT_DOUBLE_EQ(assign(2.5).bits_per_weight, 2.5);
  EXPECT_DOUBLE_EQ(assign(2.5).predicted_kl, 0.8);
  // One step up is 1.75 bits of a third of the weights.
  EXPECT_EQ(Chosen(sensitivity, assign(3.08)), (Formats{low, low, low}));
  EXPECT_EQ(Chosen(sensitivity, assign(3.09)), (Formats{low, "nf4/g64", low}));
  EXPECT_EQ(Chosen(sensitivity, assign(3.7)), (Formats{low, "nf4/g64", "nf4/g64"}));
  EXPECT_DOUBLE_EQ(assign(3.7).predicted_kl, 0.1 + 0.1 + 0.01);
  // The second from nf4 to s8 gains less per bit than the first from int2 to nf4.
  EXPECT_EQ(Chosen(sensitivity, assign(4.3)), (Formats{"nf4/g64", "nf4/g64", "nf4/g64"}));
  EXPECT_EQ(Chosen(sensitivity, assign(8.25)), (Formats{"s8/g64", "s8/g64", "s8/g64"}));
  EXPECT_DOUBLE_EQ(assign(100).bits_per_weight, 8.25);
}

TEST(AssignFormats, UsesOnlyTheFormatsAskedFor) {
  const Sensitivity sensitivity = Measured({{0.1, 0.01, 0}, {0.5, 0.1, 0}});
  const auto choices = Choices({"s8/g64", "nf4/g64"});
  const auto made = AssignFormats(sensitivity, Tensors(sensitivity), 7.0, choices);
  ASSERT_TRUE(made.ok());
  EXPECT_EQ(Chosen(sensitivity, *made), (std::vector<std::string>{"nf4/g64", "s8/g64"}));
  const auto unknown = AssignFormats(sensitivity, Tensors(sensitivity), 7.0, Choices({"u4/g64"}));
  EXPECT_EQ(unknown.status().message(), "format u4/g64: was not measured");
}

TEST(AssignFormats, NeverPaysForAFormatThatIsWorse) {
  // More bits, and more harm: int2 is the best choice at any target.
  const Sensitivity sensitivity = Measured({{0.1, 0.2, 0.1}});
  const auto made = AssignFormats(sensitivity, Tensors(sensitivity), 8.25);
  EXPECT_EQ(Chosen(sensitivity, *made), (std::vector<std::string>{"int2/g64/frac"}));
}

TEST(AssignFormats, TiesGoToTheFirst) {
  const Sensitivity sensitivity = Measured({{0.1, 0.01, 0}, {0.1, 0.01, 0}, {0.1, 0.01, 0}});
  const auto made = AssignFormats(sensitivity, Tensors(sensitivity), 3.7);
  EXPECT_EQ(Chosen(sensitivity, *made),
            (std::vector<std::string>{"nf4/g64", "nf4/g64", "int2/g64/frac"}));
}

TEST(AssignFormats, CountsEveryExpertOfAStack) {
  Sensitivity sensitivity = Measured({{0.1, 0.01, 0}, {0.1, 0.0, 0}});
  sensitivity.matrices[0].name = "model.layers.0.mlp.experts.down_proj";
  sensitivity.matrices[0].experts = 3;
  const auto made = AssignFormats(sensitivity, Tensors(sensitivity), 3.0);
  ASSERT_TRUE(made.ok()) << made.status().message();
  EXPECT_DOUBLE_EQ(made->bits_per_weight, (3 * 2.5 + 4.25) / 4);
}

/// The least sum of KL within the budget, by trying everything.
double Optimum(const Sensitivity& sensitivity, double target) {
  constexpr double kBits[] = {2.5, 4.25, 8.25};
  const size_t count = sensitivity.matrices.size();
  double best = 1e9;
  size_t all = 1;
  for (size_t i = 0; i < count; ++i) all *= 3;
  for (size_t code = 0; code < all; ++code) {
    double bits = 0;
    double kl = 0;
    size_t rest = code;
    for (const Sensitivity::Matrix& matrix : sensitivity.matrices) {
      bits += kBits[rest % 3] / static_cast<double>(count);
      kl += matrix.kl[rest % 3];
      rest /= 3;
    }
    if (bits <= target) best = std::min(best, kl);
  }
  return best;
}

TEST(AssignFormats, IsAtMostOneStepFromTheOptimum) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> uniform;
  for (int trial = 0; trial < 30; ++trial) {
    std::vector<std::vector<double>> kl;
    double largest = 0;
    for (int i = 0; i < 7; ++i) {
      const double worst = uniform(random);
      const double middle = worst * uniform(random);
      kl.push_back({worst, middle, middle * uniform(random)});
      largest = std::max(largest, worst);
    }
    const Sensitivity sensitivity = Measured(kl);
    const double target = 2.5 + 5.75 * uniform(random);
    const auto made = AssignFormats(sensitivity, Tensors(sensitivity), target);
    ASSERT_TRUE(made.ok());
    EXPECT_LE(made->bits_per_weight, target);
    const double optimum = Optimum(sensitivity, target);
    EXPECT_GE(made->predicted_kl, optimum - 1e-12);
    EXPECT_LE(made->predicted_kl, optimum + largest);
  }
}

TEST(AssignFormats, RefusesWhatCannotBe) {
  const Sensitivity sensitivity = Measured({{0.1, 0.01, 0}});
  const auto refused = [&](double target, const std::string& message) {
    const auto made = AssignFormats(sensitivity, Tensors(sensitivity), target);
    EXPECT_EQ(made.status().code(), Code::kInvalidArgument);
    EXPECT_EQ(made.status().message(), message);
  };
  refused(2.4, "target: 2.4 bits per weight, the smallest formats take 2.5000");
  refused(0, "target: expected a positive number of bits, got 0");
  refused(std::numeric_limits<double>::quiet_NaN(),
          "target: expected a positive number of bits, got nan");
  std::vector<TensorShape> tensors = Tensors(sensitivity);
  tensors[0].shape = {64, 128};
  EXPECT_EQ(AssignFormats(sensitivity, tensors, 4).status().message(),
            "sensitivity of another model: \"model.layers.0.mlp.up_proj.weight\" has 4096 weights, "
            "not 8192");
  EXPECT_EQ(AssignFormats(sensitivity, {}, 4).status().message(),
            "sensitivity of another model: \"model.layers.0.mlp.up_proj.weight\" has 4096 weights, "
            "not 0");
  EXPECT_EQ(AssignFormats(Measured({}), {}, 4).status().message(), "sensitivity: has no matrices");
}

TEST(AssignFormats, TheLeastBitsAreThoseOfTheSmallestFormats) {
  const Sensitivity sensitivity = Measured({{0.1, 0.01, 0}});
  EXPECT_DOUBLE_EQ(*LeastBitsPerWeight(sensitivity.matrices, sensitivity.formats), 2.5);
  EXPECT_EQ(*LeastBitsPerWeight({}, sensitivity.formats), 0.0);
  EXPECT_TRUE(CheckTarget(sensitivity.matrices, sensitivity.formats, 2.5).ok());
  const auto assigned = AssignFormats(sensitivity, Tensors(sensitivity), 2.5);
  ASSERT_TRUE(assigned.ok());
  EXPECT_EQ(assigned->weights, 4096);
}

TEST(AssignFormats, TheRecipeIsReadAgainFromItsText) {
  const Sensitivity sensitivity = Measured({{0.1, 0.01, 0}, {0.5, 0.1, 0}});
  const MixedPrecisionConfig recipe = AssignFormats(sensitivity, Tensors(sensitivity), 4.0)->recipe;
  const auto again = MixedPrecisionConfig::FromJson(recipe.ToJson());
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again->tensors(), recipe.tensors());
  EXPECT_EQ(again->name(), "target-bpw:4");
}

TEST(RecipeTensors, PrecedeClassesAndFollowOverrides) {
  auto recipe = *MixedPrecisionConfig::FromJson(R"({"base": "default_moe",
    "tensors": {"model.layers.0.self_attn.q_proj.weight": "s8/g64",
                "model.layers.1.self_attn.q_proj.weight": "s8/g64"},
    "overrides": [{"glob": "*.layers.1.*", "choice": "keep"}]})");
  const auto chosen = [&](const std::string& name) {
    return recipe.Choose(name, {64, 64}).ToString();
  };
  EXPECT_EQ(chosen("model.layers.0.self_attn.q_proj.weight"), "s8/g64");
  EXPECT_EQ(chosen("model.layers.1.self_attn.q_proj.weight"), "keep");
  EXPECT_EQ(chosen("model.layers.2.self_attn.q_proj.weight"), "fp4_e2m1/g64");
  const TensorShape one{"model.layers.0.self_attn.q_proj.weight", {64, 64}};
  const TensorShape two{"model.layers.1.self_attn.q_proj.weight", {64, 64}};
  const std::vector<TensorShape> both = {one, two};
  EXPECT_TRUE(recipe.CheckTensors(both).ok());
  EXPECT_EQ(recipe.CheckTensors({&one, 1}).message(),
            "recipe of another model: it has no tensor \"model.layers.1.self_attn.q_proj.weight\"");
  EXPECT_THAT(MixedPrecisionConfig::FromJson(R"({"tensors": []})").status().message(),
              HasSubstr("tensors: expected an object"));
  EXPECT_THAT(MixedPrecisionConfig::FromJson(R"({"tensors": {"a": "u9"}})").status().message(),
              HasSubstr("tensors.a"));
}

TEST(SensitivityFile, IsReadAgainFromItsText) {
  Sensitivity sensitivity = Measured({{0.125, 1e-17, 0}, {3, 0.1, 1e-300}});
  sensitivity.matrices[1].experts = 8;
  const auto again = Sensitivity::FromJson(sensitivity.ToJson(), "file");
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(*again, sensitivity);
}

TEST(SensitivityFile, RefusesWrongContent) {
  const std::string whole = Measured({{0.5, 0.25, 0}}).ToJson();
  const auto refused = [&](const std::string& from, const std::string& to,
                           const std::string& message) {
    std::string text = whole;
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    const auto read = Sensitivity::FromJson(text, "s.json");
    EXPECT_EQ(read.status().code(), Code::kMalformedFile) << text;
    EXPECT_THAT(read.status().message(), HasSubstr(message));
    EXPECT_THAT(read.status().message(), HasSubstr("s.json"));
    EXPECT_EQ(read.status().message().find('\n'), std::string::npos);
  };
  refused("\"qwen3\"", "3", "model_type: expected a string");
  refused("\"tokens\":2048", "\"tokens\":0", "tokens: expected a whole number");
  refused("\"tokens\":2048", "\"tokens\":-1", "tokens: expected a whole number");
  refused("\"k\":64", "\"k\":3000000000", "k: expected a whole number");
  refused("\"k\":64,", "", "k: expected a whole number");
  refused("\"experts\":1,\"k\":64,\"n\":64",
          "\"experts\":2000000000,\"k\":2000000000,\"n\":2000000000", "too many weights");
  refused("\"nf4/g64\"", "\"nf4/g63\"", "group size");
  refused("\"nf4/g64\"", "\"keep\"", "keep is not quantized");
  refused("\"nf4/g64\"", "\"s8/g64\"", "s8/g64 is there twice");
  refused("\"nf4/g64\"", "4", "formats: expected strings");
  refused("0.5,0.25,0.0", "0.5,0.25", "kl: expected 3 numbers, one per format, got 2");
  refused("0.5,0.25", "-0.5,0.25", "kl: expected a number of at least 0");
  refused("0.5,0.25", "\"x\",0.25", "kl: expected a number of at least 0");
  refused("\"matrices\":[{", "\"matrices\":[7,{", "matrices: expected objects");
  refused("\"matrices\":[", "\"matrix\":[", "matrices: expected an array");
}

}  // namespace
}  // namespace marlin::assign_formats_test
