// Generation with speculation: the same texts as without, by every source of guesses; the
// distribution of sampled texts; and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "../../source_directory.h"
#include "../checkpoint/test_files.h"
#include "../test_device.h"
#include "drafted_batch.h"
#include "marlin/device.h"
#include "marlin/generate.h"
#include "marlin/model.h"
#include "marlin/speculation.h"
#include "random_model.h"
#include "remote_backend.h"

namespace marlin::drafted_generation_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kVocab = 128;
using Tokens = std::vector<int32_t>;

Tokens Repetitive() {
  Tokens tokens;
  for (int i = 0; i < 6; ++i) tokens.insert(tokens.end(), {7, 1, 30, 99, 12});
  return tokens;
}

/// A qwen2, the draft that has its weights, and one that has not all of them.
class DraftedOn : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    testing::WriteQwen2(directory_.path(), 0);
    testing::WriteQwen2(other_.path(), 2);
    model_ = Open(directory_.path());
    twin_ = Open(directory_.path());
    stranger_ = Open(other_.path());
  }
  static Model Open(const std::string& path) {
    const Device device = GetParam() == "remote" ? testing::OpenRemote({.records = true})
                                                 : *Device::Open(GetParam(), {.threads = 2});
    auto model = Model::Open(path, device, {.batch_invariant = true});
    EXPECT_TRUE(model.ok()) << model.status().message();
    return *std::move(model);
  }
  static Generated Must(const Result<Generated>& made) {
    EXPECT_TRUE(made.ok()) << made.status().message();
    return made.ok() ? *made : Generated();
  }

  testing::TemporaryDirectory directory_;
  testing::TemporaryDirectory other_;
  std::optional<Model> model_;
  std::optional<Model> twin_;
  std::optional<Model> stranger_;
};

INSTANTIATE_TEST_SUITE_P(Devices, DraftedOn, ::testing::Values(TestDevice(), "remote"),
                         [](const auto& device) { return NameOfDevice(device.param); });

/// Samplers that are greedy, hot, and that have penalties.
std::vector<SamplingOptions> Samplings() {
  return {{},
          {.temperature = 0.7F, .seed = 5},
          {.temperature = 0.4F,
           .top_k = 9,
           .seed = 2,
           .repetition_penalty = 0.8F,
           .frequency_penalty = 0.1F}};
}

TEST_P(DraftedOn, TextsAreThoseWithoutIt) {
  int64_t wrong = 0;
  for (const SamplingOptions& sampling : Samplings()) {
    GenerateOptions options{.max_tokens = 40, .sampling = sampling};
    const Generated plain = Must(Generate(*model_, Repetitive(), options));
    EXPECT_EQ(plain.drafts.passes, 0);
    for (const auto& draft : {std::optional<Model>(), twin_, stranger_}) {
      options.speculation = testing::SpeculateBy(draft, false);
      EXPECT_EQ(Must(Generate(*model_, Repetitive(), options)).token_ids, plain.token_ids);
      options.speculation.always = true;
      Tokens called;
      const Generated made = Must(Generate(*model_, Repetitive(), options, [&](int32_t token) {
        called.push_back(token);
        return true;
      }));
      EXPECT_EQ(made.token_ids, plain.token_ids);
      EXPECT_EQ(called, plain.token_ids);
      EXPECT_EQ(made.stop_reason, plain.stop_reason);
      EXPECT_LE(made.drafts.accepted, made.drafts.drafted);
      EXPECT_LE(made.drafts.drafted, 5 * made.drafts.passes);
      if (draft) {
        EXPECT_GT(made.drafts.drafted, 0);
      }
    }
    // A draft with the same weights draws with the text's own random numbers.
    options.speculation = testing::SpeculateBy(twin_);
    const DraftCounts twins = Must(Generate(*model_, Repetitive(), options)).drafts;
    EXPECT_EQ(twins.accepted, twins.drafted);
    EXPECT_EQ(twins.passes, 7);  // After the first token, six at a time.
    options.speculation = testing::SpeculateBy(stranger_);
    const DraftCounts strangers = Must(Generate(*model_, Repetitive(), options)).drafts;
    wrong += strangers.drafted - strangers.accepted;
  }
  EXPECT_GT(wrong, 0);
}

TEST_P(DraftedOn, GoesOnWithASequence) {
  GenerateOptions options{.max_tokens = 12};
  const Tokens prompt = Repetitive();
  const Generated plain = Must(Generate(*model_, prompt, options));
  for (const auto& draft : {std::optional<Model>(), twin_}) {
    options.speculation = testing::SpeculateBy(draft);
    Sequence sequence = *model_->NewSequence();
    const SequenceInput begin{&sequence, std::span(prompt).first(9)};
    std::vector<float> logits(kVocab);
    ASSERT_TRUE(model_->Forward({&begin, 1}, {logits.data(), DType::kF32, {1, kVocab}}).ok());
    const Generated made = Must(Generate(*model_, &sequence, prompt, options));
    EXPECT_EQ(made.token_ids, plain.token_ids);
    // Prompt and continuation, without the last token.
    ASSERT_GE(sequence.length(), std::ssize(prompt) + 11);
    ASSERT_TRUE(sequence.Truncate(std::ssize(prompt) + 5).ok());
    Tokens longer = prompt;
    longer.insert(longer.end(), plain.token_ids.begin(), plain.token_ids.begin() + 6);
    const Generated rest = Must(Generate(*model_, &sequence, longer, options));
    EXPECT_EQ(Tokens(rest.token_ids.begin(), rest.token_ids.begin() + 6),
              Tokens(plain.token_ids.begin() + 6, plain.token_ids.end()));
  }
}

TEST_P(DraftedOn, BatchesToo) {
  const std::vector<Tokens> prompts = {
      Repetitive(), {5, 9, 2}, {7}, testing::TokensBelow(kVocab, 70)};
  testing::ExpectDraftedBatch(*model_, *twin_, *stranger_, prompts);
}

TEST_P(DraftedOn, EndsWhereItIsTold) {
  GenerateOptions options{.max_tokens = 30, .speculation = testing::SpeculateBy(twin_)};
  const Tokens all = Must(Generate(*model_, Repetitive(), options)).token_ids;
  for (const int64_t most : {0, 1, 2, 3}) {
    options.max_tokens = most;
    EXPECT_EQ(Must(Generate(*model_, Repetitive(), options)).token_ids,
              Tokens(all.begin(), all.begin() + most));
  }
  options.max_tokens = 30;
  int64_t left = 4;
  const Generated stopped =
      Must(Generate(*model_, Repetitive(), options, [&](int32_t) { return --left > 0; }));
  EXPECT_EQ(stopped.token_ids, Tokens(all.begin(), all.begin() + 4));
  EXPECT_EQ(stopped.stop_reason, StopReason::kCallback);
  options.stop_token_ids = {all[10]};
  const Generated ended = Must(Generate(*model_, Repetitive(), options));
  EXPECT_EQ(ended.stop_reason, StopReason::kStopToken);
  EXPECT_EQ(ended.token_ids, Tokens(all.begin(), std::find(all.begin(), all.end(), all[10])));
}

/// The probabilities of the next token among the `top` most likely ones.
std::vector<double> Probabilities(const Model& model, const Tokens& text, int64_t top) {
  std::vector<float> logits(kVocab);
  Sequence sequence = *model.NewSequence();
  const SequenceInput input{&sequence, text};
  EXPECT_TRUE(model.Forward({&input, 1}, {logits.data(), DType::kF32, {1, kVocab}}).ok());
  std::vector<float> sorted = logits;
  std::sort(sorted.rbegin(), sorted.rend());
  std::vector<double> shares(kVocab);
  for (size_t i = 0; i < shares.size(); ++i) {
    if (logits[i] >= sorted[static_cast<size_t>(top) - 1]) {
      shares[i] = std::exp(double{logits[i]} - double{sorted[0]});
    }
  }
  const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
  for (double& share : shares) share /= sum;
  return shares;
}

/// The second token is guessed. Over many seeds its pairs with the first one are as frequent as the
/// model says, whatever guesses them: chi-squared with 8 degrees of freedom exceeds 31.8 once in
/// 10,000 times.
TEST(DraftedSampling, KeepsTheDistribution) {
  constexpr int64_t kTop = 3;
  constexpr int kTexts = 900;
  testing::TemporaryDirectory directory;
  testing::TemporaryDirectory other;
  testing::WriteQwen2(directory.path(), 0);
  testing::WriteQwen2(other.path(), 2);
  const Device device = *Device::Open("cpu", {.threads = 1});
  const Model model = *Model::Open(directory.path(), device);
  const Model draft = *Model::Open(other.path(), device);
  // Lookup guesses 30 after 7 and 1.
  const Tokens prompt = {7, 1, 30, 7, 1, 9, 7, 1};
  std::map<std::pair<int32_t, int32_t>, double> expected;
  const std::vector<double> first = Probabilities(model, prompt, kTop);
  for (int32_t i = 0; i < kVocab; ++i) {
    if (first[static_cast<size_t>(i)] == 0) continue;
    Tokens text = prompt;
    text.push_back(i);
    const std::vector<double> second = Probabilities(model, text, kTop);
    for (int32_t j = 0; j < kVocab; ++j) {
      const double both = first[static_cast<size_t>(i)] * second[static_cast<size_t>(j)];
      if (both > 0) expected[{i, j}] = both * kTexts;
    }
  }
  ASSERT_EQ(expected.size(), static_cast<size_t>(kTop * kTop));
  GenerateOptions options{.max_tokens = 3, .sampling = {.temperature = 1, .top_k = kTop}};
  options.speculation = {
      .tokens = 2, .always = true, .source = DraftSource::kModel, .model = draft};
  std::map<std::pair<int32_t, int32_t>, double> counts;
  DraftCounts drafts;
  for (int seed = 0; seed < kTexts; ++seed) {
    options.sampling.seed = static_cast<uint64_t>(seed);
    const auto made = Generate(model, prompt, options);
    ASSERT_TRUE(made.ok()) << made.status().message();
    ++counts[{made->token_ids[0], made->token_ids[1]}];
    drafts.drafted += made->drafts.drafted;
    drafts.accepted += made->drafts.accepted;
  }
  EXPECT_GT(drafts.accepted, kTexts / 20);
  EXPECT_LT(drafts.accepted, drafts.drafted - kTexts / 20);
  double chi = 0;
  double found = 0;
  for (const auto& [pair, count] : expected) {
    chi += (counts[pair] - count) * (counts[pair] - count) / count;
    found += counts[pair];
  }
  EXPECT_EQ(found, kTexts);
  EXPECT_LT(chi, 31.8);
}

/// Changes a key of a model's config.json.
void SetKey(const std::string& path, const std::string& key, const nlohmann::json& value) {
  nlohmann::json config = nlohmann::json::parse(std::ifstream(path + "/config.json"));
  config[key] = value;
  testing::WriteFile(path + "/config.json", config.dump());
}

/// Where a draft says nothing that is finite about one text, others have all of their guesses.
TEST(DraftedGeneration, GoesOnNextToATextThatCannotBeGuessed) {
  constexpr int32_t kNan = 55;
  testing::TemporaryDirectory directory;
  testing::TemporaryDirectory of_draft;
  testing::WriteQwen2(directory.path(), 0);
  testing::WriteQwen2(of_draft.path(), 0, kNan);
  const Device device = *Device::Open("cpu", {.threads = 2});
  const Model model = *Model::Open(directory.path(), device, {.batch_invariant = true});
  const Model draft = *Model::Open(of_draft.path(), device, {.batch_invariant = true});
  const std::vector<Tokens> prompts = {{9, kNan}, {1, 2, 3}, {kNan, 4}, {7, 7}, Repetitive()};
  std::vector<GenerateOptions> options(prompts.size(), GenerateOptions{.max_tokens = 19});
  options[3].max_tokens = options[4].max_tokens = 60;
  options[3].sampling = {.temperature = 1.0F, .seed = 1};
  options[4].sampling = {.temperature = 1.0F, .seed = 2};
  const auto plain = GenerateBatch(model, prompts, options);
  for (GenerateOptions& of_text : options) of_text.speculation = testing::SpeculateBy(draft);
  const auto made = GenerateBatch(model, prompts, options);
  ASSERT_TRUE(plain.ok() && made.ok());
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto& [tokens, drafts] = std::pair((*made)[i].token_ids, (*made)[i].drafts);
    EXPECT_EQ(tokens, (*plain)[i].token_ids) << i;
    ASSERT_EQ(std::count(tokens.begin(), tokens.end(), kNan), 0) << i;
    // The first five of a text that has not been sampled yet are greedy.
    EXPECT_LE(drafts.drafted - drafts.accepted, i < 3 ? 0 : 5) << i;
    if (i >= 3) continue;
    // After the first token, six at a time.
    EXPECT_EQ(drafts.passes, i == 1 ? 3 : 0) << i;
  }
}

TEST(DraftedGeneration, RefusesWhatCannotGuess) {
  testing::TemporaryDirectory directory;
  testing::WriteQwen2(directory.path(), 0);
  const Device device = *Device::Open("cpu", {.threads = 1});
  const Model model = *Model::Open(directory.path(), device);
  const auto refused = [&](const SpeculationOptions& speculation) {
    const auto made = Generate(model, Tokens{1, 2}, {.speculation = speculation});
    EXPECT_FALSE(made.ok());
    return std::string(made.status().message());
  };
  EXPECT_EQ(refused({.tokens = 65}), "speculation.tokens: expected 0..64, got 65");
  EXPECT_EQ(refused({.tokens = -1}), "speculation.tokens: expected 0..64, got -1");
  EXPECT_EQ(refused({.always = true}), "speculation.tokens: expected 1 or more, got 0");
  EXPECT_EQ(refused({.tokens = 2, .source = DraftSource::kModel}),
            "speculation.model: expected one, which kModel needs");
  EXPECT_EQ(refused({.tokens = 2, .model = model}),
            "speculation.model: only with the source kModel");
  EXPECT_THAT(refused({.tokens = 2, .source = DraftSource::kLayer}),
              HasSubstr("speculation: draft: the model was opened without"));
  const auto by = [&](const Model& draft) {
    return refused({.tokens = 2, .source = DraftSource::kModel, .model = draft});
  };
  EXPECT_EQ(by(model), "speculation: draft: " + directory.path() + " is the model itself");
  // The sample model has another vocabulary.
  const std::string sample = SourceDirectory() + "/examples/tiny-qwen3-moe";
  const Model other = *Model::Open(sample, device);
  EXPECT_EQ(by(other), "speculation: draft: " + sample + " has a vocabulary of " +
                           std::to_string(other.info().vocab_size) + " tokens, " +
                           directory.path() + " of 128; expected the same");
  testing::TemporaryDirectory ends;
  testing::WriteQwen2(ends.path(), 0);
  SetKey(directory.path(), "eos_token_id", 3);
  SetKey(ends.path(), "eos_token_id", 4);
  const Model ending = *Model::Open(directory.path(), device);
  const Status status = CheckDraftModel(ending, *Model::Open(ends.path(), device));
  EXPECT_EQ(std::string(status.message()), "draft: " + ends.path() + " ends texts with token 4, " +
                                               directory.path() + " with 3; expected the same");
  EXPECT_TRUE(CheckDraftModel(model, ending).ok());
}

}  // namespace
}  // namespace marlin::drafted_generation_test
