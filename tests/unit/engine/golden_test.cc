// The sample models against the results of the reference implementation in fp32 (golden.json).
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../../source_directory.h"
#include "../test_device.h"
#include "marlin/generate.h"
#include "marlin/model.h"

namespace marlin::golden_test {
namespace {

class Golden : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string directory = SourceDirectory() + "/" + GetParam();
    std::ifstream file(directory + "/golden.json");
    ASSERT_TRUE(file.good()) << directory;
    golden_ = nlohmann::json::parse(file);
    prompt_ = golden_["prompt_ids"].get<std::vector<int32_t>>();
    device_ = *Device::Open(TestDevice());
    auto model = Model::Open(directory, *device_, {.allow_bf16_activations = false});
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = *model;
  }

  /// Returns the logits [rows, vocab] of a call.
  std::vector<float> Forward(std::span<const SequenceInput> inputs, int64_t rows) {
    std::vector<float> logits(static_cast<size_t>(rows * vocab()));
    const MutableTensorView view(logits.data(), DType::kF32, {rows, vocab()});
    const Status status = model_->Forward(inputs, view);
    EXPECT_TRUE(status.ok()) << status.message();
    return logits;
  }
  int64_t vocab() const { return model_->info().vocab_size; }
  int64_t prompt_tokens() const { return static_cast<int64_t>(prompt_.size()); }

  nlohmann::json golden_;
  std::vector<int32_t> prompt_;
  std::optional<Device> device_;
  std::optional<Model> model_;
};
// The linear layers' kernels for Apple GPUs, in the simulator: a few tokens, which take seconds.
TEST_P(Golden, GreedyTokensOfTheMetalSimulator) {
  const Result<Device> device = Device::Open("metal-sim");
  if (!device.ok()) GTEST_SKIP() << device.status().message();
  const auto model = Model::Open(SourceDirectory() + "/" + GetParam(), *device, {});
  ASSERT_TRUE(model.ok()) << model.status().message();
  auto greedy = golden_["greedy_ids"].get<std::vector<int32_t>>();
  greedy.resize(4);
  GenerateOptions options;
  options.max_tokens = static_cast<int64_t>(greedy.size());
  const auto generated = Generate(*model, prompt_, options);
  ASSERT_TRUE(generated.ok()) << generated.status().message();
  EXPECT_EQ(generated->token_ids, greedy);
}

INSTANTIATE_TEST_SUITE_P(SampleModels, Golden,
                         ::testing::Values("examples/tiny-qwen3-moe", "tests/data/tiny-glm4-moe"),
                         [](const auto& directory) {
                           return std::string(directory.param).find("qwen3") != std::string::npos
                                      ? "Qwen3Moe"
                                      : "Glm4Moe";
                         });

TEST_P(Golden, LogitsOfThePrompt) {
  Sequence sequence = *model_->NewSequence();
  const SequenceInput input{&sequence, prompt_, true};
  const std::vector<float> logits = Forward({&input, 1}, prompt_tokens());
  const auto& first = golden_["prompt_logits_first8_tokens"];
  for (size_t i = 0; i < first.size(); ++i) {
    for (size_t j = 0; j < first[i].size(); ++j) {
      EXPECT_NEAR(logits[i * static_cast<size_t>(vocab()) + j], first[i][j].get<float>(), 1e-3);
    }
  }
  const auto last = logits.end() - vocab();
  EXPECT_EQ(std::max_element(last, logits.end()) - last,
            golden_["prompt_logits_last_position_argmax"].get<int64_t>());
  EXPECT_EQ(sequence.length(), prompt_tokens());
}

TEST_P(Golden, GreedyTokens) {
  const auto greedy = golden_["greedy_ids"].get<std::vector<int32_t>>();
  GenerateOptions options;
  options.max_tokens = static_cast<int64_t>(greedy.size());
  options.ignore_eos = true;
  const auto generated = Generate(*model_, prompt_, options);
  ASSERT_TRUE(generated.ok()) << generated.status().message();
  EXPECT_EQ(generated->token_ids, greedy);
}

// A conversation: tokens that a sequence holds are not fed again, and the text is the same.
TEST_P(Golden, GeneratesAfterTheTokensOfASequence) {
  GenerateOptions options;
  options.max_tokens = 9;
  options.ignore_eos = true;
  Sequence sequence = *model_->NewSequence();
  std::vector<int32_t> text = prompt_;
  for (int turn = 0; turn < 3; ++turn) {
    const auto want = Generate(*model_, text, options);
    const auto got = Generate(*model_, &sequence, text, options);
    ASSERT_TRUE(got.ok()) << got.status().message();
    EXPECT_EQ(got->token_ids, want->token_ids);
    EXPECT_EQ(sequence.length(), std::ssize(text) + options.max_tokens - 1);
    text.insert(text.end(), got->token_ids.begin(), got->token_ids.end());
    text.insert(text.end(), {5, 6});
  }
  EXPECT_TRUE(sequence.Truncate(prompt_tokens() - 1).ok());
  EXPECT_EQ(Generate(*model_, &sequence, prompt_, options)->token_ids,
            Generate(*model_, prompt_, options)->token_ids);
  const auto whole = Generate(*model_, &sequence, std::span(prompt_).first(4), options);
  EXPECT_EQ(whole.status().message(),
            "sequence: expected less than the 4 tokens of the prompt, got " +
                std::to_string(prompt_tokens() + 8));
  EXPECT_EQ(Generate(*model_, nullptr, prompt_, options).status().message(),
            "sequence: expected one, got null");
}

// The exact GEMMs give the same bits however the tokens are split and batched.
TEST_P(Golden, PiecesAndBatchesGiveTheSameLogits) {
  Sequence whole = *model_->NewSequence();
  const SequenceInput all{&whole, prompt_, true};
  const std::vector<float> want = Forward({&all, 1}, prompt_tokens());

  Sequence pieces = *model_->NewSequence();
  std::vector<float> got;
  for (size_t first = 0; first < prompt_.size();) {
    const size_t count = std::min(prompt_.size() - first, first % 3 + 1);
    const SequenceInput piece{&pieces, std::span(prompt_).subspan(first, count), true};
    const std::vector<float> part = Forward({&piece, 1}, static_cast<int64_t>(count));
    got.insert(got.end(), part.begin(), part.end());
    first += count;
  }
  EXPECT_EQ(got, want);

  Sequence a = *model_->NewSequence();
  Sequence b = *model_->NewSequence();
  const SequenceInput both[] = {{&a, std::span(prompt_).first(3), false}, {&b, prompt_, true}};
  const std::vector<float> batch = Forward(both, 1 + prompt_tokens());
  EXPECT_TRUE(std::equal(batch.begin(), batch.begin() + vocab(), want.begin() + 2 * vocab()));
  EXPECT_TRUE(std::equal(batch.begin() + vocab(), batch.end(), want.begin()));

  ASSERT_TRUE(pieces.Truncate(2).ok());
  const SequenceInput rest{&pieces, std::span(prompt_).subspan(2), true};
  const std::vector<float> again = Forward({&rest, 1}, prompt_tokens() - 2);
  EXPECT_TRUE(std::equal(again.begin(), again.end(), want.begin() + 2 * vocab()));
}

}  // namespace
}  // namespace marlin::golden_test
