// The harm of each matrix: against a whole quantized model, any number of threads, resumed runs.
#include "marlin/sensitivity.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "../../source_directory.h"
#include "../checkpoint/test_files.h"
#include "../engine/random_model.h"
#include "marlin/checkpoint.h"
#include "marlin/device.h"
#include "marlin/evaluate.h"
#include "marlin/model.h"
#include "recipe/expert_name.h"

namespace marlin::sensitivity_test {
namespace {

Device WithThreads(int threads) { return *Device::Open("cpu", {.threads = threads}); }

class Sensitive : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directories(directory_ / "model");
    testing::WriteQwen2(directory_ / "model", 8);
    options_.formats = {*ParseFormatChoice("int2/g32"), *ParseFormatChoice("s8/g32")};
    std::mt19937 random(5);
    for (int i = 0; i < 600; ++i) {
      options_.text.text.push_back(static_cast<int32_t>(random() % 128));
    }
  }
  Result<Sensitivity> Run(int threads = 2) {
    return MeasureSensitivity(directory_ / "model", WithThreads(threads), options_);
  }

  testing::TemporaryDirectory directory_;
  SensitivityOptions options_;
};

/// The trained model: the predictions of one with random weights hardly move.
TEST_F(Sensitive, EqualsTheDivergenceOfAModelWithThatMatrixQuantized) {
  const std::string source = SourceDirectory() + "/tests/data/tiny-glm4-moe";
  const auto sensitivity = MeasureSensitivity(source, WithThreads(2), options_);
  ASSERT_TRUE(sensitivity.ok()) << sensitivity.status().message();
  EXPECT_EQ(sensitivity->model_type, "glm4_moe");
  EXPECT_EQ(sensitivity->tokens, 512);
  const ModelOptions exact{.allow_bf16_activations = false};
  const Device device = WithThreads(2);
  const Model reference = *Model::Open(source, device, exact);
  int compared = 0;
  for (size_t index = 0; index < sensitivity->matrices.size(); index += 9) {
    const Sensitivity::Matrix& matrix = sensitivity->matrices[index];
    EXPECT_GT(matrix.kl[0], matrix.kl[1]) << matrix.name;
    QuantizeCheckpointOptions quantize;
    quantize.method = QuantizeMethod::kMse;
    quantize.overwrite = true;
    quantize.recipe.SetTensor(matrix.name, options_.formats[0]);
    ASSERT_TRUE(QuantizeCheckpoint(source, directory_ / "out", quantize).ok());
    const Model model = *Model::Open(directory_ / "out", device, exact);
    const auto result = CompareModels(model, reference, options_.text.text);
    ASSERT_TRUE(result.ok());
    // An expert that no token selects has another's cost.
    if (result->kl_mean == 0.0) continue;
    EXPECT_NEAR(matrix.kl[0] / result->kl_mean, 1.0, 1e-3) << matrix.name;
    ++compared;
  }
  EXPECT_GE(compared, 6);
}

/// Experts beyond the text's reach are not free.
TEST_F(Sensitive, AnExpertThatNoTokenSelectsCostsAsMuchAsTheLeastOther) {
  options_.text.text.resize(2);
  const auto sensitivity =
      MeasureSensitivity(SourceDirectory() + "/tests/data/tiny-glm4-moe", WithThreads(2), options_);
  ASSERT_TRUE(sensitivity.ok()) << sensitivity.status().message();
  std::map<std::string, std::multiset<double>> costs;  // By the name that experts share.
  for (const Sensitivity::Matrix& matrix : sensitivity->matrices) {
    EXPECT_GT(matrix.kl[0], 0.0) << matrix.name;
    if (const auto expert = ParseExpertName(matrix.name)) {
      costs[expert->common].insert(matrix.kl[0]);
    }
  }
  ASSERT_FALSE(costs.empty());
  for (const auto& [name, all] : costs) {
    // Two tokens select at most four experts.
    EXPECT_GE(all.count(*all.begin()), all.size() - 3) << name;
  }
}

TEST_F(Sensitive, TheSameBitsWithAnyNumberOfThreads) {
  const auto one = Run(1);
  ASSERT_TRUE(one.ok());
  EXPECT_EQ(*Run(16), *one);
}

TEST_F(Sensitive, AnInterruptedRunIsContinued) {
  const Sensitivity whole = *Run();
  int layers = 0;
  Sensitivity saved;
  options_.save = [&](const Sensitivity& so_far) -> Status {
    saved = so_far;
    return ++layers == 2 ? Status(Code::kIo, "stopped") : Status();
  };
  EXPECT_EQ(Run().status().message(), "stopped");
  ASSERT_EQ(saved.matrices.size(), 2U * 7U);
  // Earlier measurements are reused.
  saved.matrices[3].kl[0] = 17.0;
  options_.measured = saved;
  options_.save = {};
  int64_t steps = 0;
  int64_t last = 0;
  options_.progress = [&](int64_t done, int64_t total) {
    ++steps;
    last = done;
    EXPECT_EQ(total, 3 * 7 * 2);
  };
  Sensitivity resumed = *Run();
  EXPECT_EQ(steps, 7 * 2);
  EXPECT_EQ(last, 3 * 7 * 2);
  EXPECT_EQ(resumed.matrices[3].kl[0], 17.0);
  resumed.matrices[3].kl[0] = whole.matrices[3].kl[0];
  EXPECT_EQ(resumed, whole);
  // Nothing is taken over from another text.
  options_.text.text[0] ^= 1;
  steps = 0;
  ASSERT_TRUE(Run().ok());
  EXPECT_EQ(steps, 3 * 7 * 2);
}

TEST_F(Sensitive, ATargetThatNoFormatMeetsIsRefusedBeforeAnythingIsMeasured) {
  int64_t steps = 0;
  options_.progress = [&](int64_t, int64_t) { ++steps; };
  options_.formats = {*ParseFormatChoice("nf3/g64"), *ParseFormatChoice("s8/g64")};
  for (const double target : {3.2, 0.001, -1.0}) {
    options_.target = target;
    const auto refused = Run();
    EXPECT_EQ(refused.status().code(), Code::kInvalidArgument);
    EXPECT_TRUE(refused.status().message().starts_with("target: ")) << refused.status().message();
  }
  EXPECT_EQ(steps, 0);
  options_.target = 4;
  const auto taken = Run();
  EXPECT_TRUE(taken.ok()) << taken.status().message();
  EXPECT_GT(steps, 0);
}

TEST_F(Sensitive, RefusesWrongCalls) {
  const auto refused = [this](const std::string& message) {
    const auto run = Run();
    EXPECT_EQ(run.status().code(), Code::kInvalidArgument);
    EXPECT_EQ(run.status().message(), message);
  };
  options_.formats.push_back(*ParseFormatChoice("s8/g32"));
  refused("formats: s8/g32 is there twice");
  options_.formats[2] = *ParseFormatChoice("bf16");
  refused("formats: bf16 is not quantized");
  options_.formats.pop_back();
  options_.text.text[3] = 128;
  refused("calibration text: token 3 is 128, expected 0..127");
  options_.text.text = {1};
  refused("calibration text: expected 2 tokens or more, got 1");
}

}  // namespace
}  // namespace marlin::sensitivity_test
