// Speculation: guesses from the text, and texts that are the same with and without them; masks and
// log-probabilities of a call.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "../checkpoint/test_files.h"
#include "../test_device.h"
#include "engine/speculation/prompt_lookup.h"
#include "marlin/device.h"
#include "marlin/model.h"
#include "marlin/sampling.h"
#include "plan/step/sample_marks.h"
#include "random_model.h"
#include "remote_backend.h"

namespace marlin::speculation_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Lt;
using ::testing::SizeIs;

constexpr int64_t kVocab = 128;

std::vector<int32_t> Guess(const std::vector<int32_t>& tokens, int64_t most = 6) {
  return PromptLookup().Guess(tokens, most);
}

TEST(PromptLookup, GoesOnAsTheTextDidBefore) {
  EXPECT_THAT(Guess({1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3}), ElementsAre(4, 5, 6, 7, 8, 9));
  EXPECT_THAT(Guess({1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3}, 2), ElementsAre(4, 5));
  EXPECT_THAT(Guess({1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3}, 0), IsEmpty());
  EXPECT_THAT(Guess({1, 2, 3, 4, 5, 6, 7, 8, 9}), IsEmpty());
  EXPECT_THAT(Guess({3, 4, 5, 3}), IsEmpty());
  EXPECT_THAT(Guess({}), IsEmpty());
  EXPECT_THAT(Guess({4}), IsEmpty());
  // The longest match, and of those the latest.
  EXPECT_THAT(Guess({7, 2, 3, 50, 9, 2, 3, 60, 8, 2, 3, 70, 7, 2, 3}, 1), ElementsAre(50));
  EXPECT_THAT(Guess({7, 2, 3, 50, 9, 2, 3, 60, 8, 2, 3, 70, 6, 2, 3}, 1), ElementsAre(70));
  // A text that repeats itself goes on to.
  EXPECT_THAT(Guess({5, 6, 5, 6, 5, 6}), ElementsAre(5, 6, 5, 6, 5, 6));
  EXPECT_THAT(Guess({9, 4, 4, 4}), ElementsAre(4, 4, 4, 4, 4, 4));
}

TEST(PromptLookup, LearnsFromATextThatGrows) {
  std::vector<int32_t> tokens = {1, 2, 3};
  PromptLookup lookup;
  const auto guess = [&](int64_t most) { return lookup.Guess(tokens, most); };
  EXPECT_THAT(guess(9), IsEmpty());
  tokens.insert(tokens.end(), {4, 1, 2});
  EXPECT_THAT(guess(4), ElementsAre(3, 4, 1, 2));
  tokens.insert(tokens.end(), {8, 4, 1, 2});
  EXPECT_THAT(guess(1), ElementsAre(8));  // Which followed 4, 1, 2.
  tokens.insert(tokens.end(), {9, 1, 2});
  EXPECT_THAT(guess(1), ElementsAre(9));
}

/// Some texts of a model, with guesses or without.
class Texts {
 public:
  Texts(const Model& model, const std::vector<std::vector<int32_t>>& prompts,
        const std::vector<SamplingOptions>& options)
      : model_(model), bytes_(*SamplerStateBytes(model.device(), kVocab)), texts_(prompts) {
    const auto count = static_cast<int64_t>(prompts.size());
    samplers_ = *DeviceBuffer::Allocate(model.device(), bytes_ * count);
    for (size_t i = 0; i < prompts.size(); ++i) {
      sequences_.push_back(*model.NewSequence({.truncatable = false}));
      const auto tokens = static_cast<int64_t>(prompts[i].size());
      const DeviceBuffer prompt = *DeviceBuffer::Allocate(model.device(), 4 * tokens);
      EXPECT_TRUE(prompt.CopyFrom(prompts[i].data(), 4 * tokens).ok());
      auto* const state =
          static_cast<uint8_t*>(samplers_.data()) + static_cast<int64_t>(i) * bytes_;
      EXPECT_TRUE(ResetSampler(model.device(), options[i], kVocab,
                               {prompt.data(), DType::kI32, {tokens}},
                               {state, DType::kU8, {bytes_}})
                      .ok());
      EXPECT_TRUE(model.device().Synchronize().ok());
    }
    lookups_ = std::vector<PromptLookup>(prompts.size());
    most_.assign(prompts.size(), 0);
  }

  /// Guesses for the texts from here on; a text with 0 has none.
  void Speculate(const std::vector<int64_t>& most) {
    lookups_ = std::vector<PromptLookup>(most.size());
    most_ = most;
  }

  /// Runs one pass.
  void Step(SampleExtras extras = {}) {
    std::vector<std::vector<int32_t>> fed;
    size_t rows = 0;
    for (size_t i = 0; i < texts_.size(); ++i) {
      const auto begin = texts_[i].begin() + sequences_[i].length();
      fed.emplace_back(begin, texts_[i].end());
      std::vector<int32_t> guess;
      if (fed[i].size() == 1 && most_[i] > 0) guess = lookups_[i].Guess(texts_[i], most_[i]);
      rows += 1 + guess.size();
      guesses_.resize(texts_.size());
      guesses_[i] = guess.size();
      fed[i].insert(fed[i].end(), guess.begin(), guess.end());
    }
    std::vector<SequenceInput> inputs;
    for (size_t i = 0; i < texts_.size(); ++i) {
      inputs.push_back({.sequence = &sequences_[i],
                        .tokens = fed[i],
                        .drafts = static_cast<int64_t>(guesses_[i])});
    }
    std::vector<int32_t> tokens(rows);
    const MutableTensorView states(samplers_.data(), DType::kU8,
                                   {static_cast<int64_t>(texts_.size()), bytes_});
    const Status status = model_.ForwardAndSample(inputs, states, tokens, extras);
    ASSERT_TRUE(status.ok()) << status.message();
    auto of_text = tokens.begin();
    for (size_t i = 0; i < texts_.size(); ++i) {
      const std::vector<int32_t> row(of_text,
                                     of_text + static_cast<std::ptrdiff_t>(guesses_[i]) + 1);
      of_text += static_cast<std::ptrdiff_t>(row.size());
      const int64_t sampled = CountSampled(row);
      EXPECT_THAT(std::vector<int32_t>(row.begin() + sampled, row.end()), Each(kSkippedMark));
      ASSERT_GT(sampled, 0);
      texts_[i].insert(texts_[i].end(), row.begin(), row.begin() + sampled);
      EXPECT_EQ(sequences_[i].length() + 1, std::ssize(texts_[i]));
      guessed_ += static_cast<int64_t>(guesses_[i]);
      accepted_ += sampled - 1;
    }
  }

  /// The texts, each of which has `count` tokens or more, up to that number.
  std::vector<std::vector<int32_t>> Until(size_t count) {
    const auto is_short = [&](const std::vector<int32_t>& text) { return text.size() < count; };
    while (std::any_of(texts_.begin(), texts_.end(), is_short) && !::testing::Test::HasFailure()) {
      Step();
    }
    std::vector<std::vector<int32_t>> texts = texts_;
    for (std::vector<int32_t>& text : texts) text.resize(count);
    return texts;
  }
  int64_t guessed() const { return guessed_; }
  int64_t accepted() const { return accepted_; }
  const std::vector<std::vector<int32_t>>& texts() const { return texts_; }

 private:
  const Model& model_;
  int64_t bytes_;
  DeviceBuffer samplers_;
  std::vector<Sequence> sequences_;
  std::vector<std::vector<int32_t>> texts_;
  std::vector<PromptLookup> lookups_;
  std::vector<int64_t> most_;  ///< Guesses of each text.
  std::vector<size_t> guesses_;
  int64_t guessed_ = 0;
  int64_t accepted_ = 0;
};

/// The test's device, or one whose memory the host does not read.
class Speculation : public ::testing::TestWithParam<std::string> {
 protected:
  Model Load(int64_t window) {
    testing::WriteQwen2(directory_.path(), window);
    const Device device = GetParam() == "remote" ? testing::OpenRemote({.records = true})
                                                 : *Device::Open(GetParam(), {.threads = 2});
    auto model = Model::Open(directory_.path(), device, {.batch_invariant = true});
    EXPECT_TRUE(model.ok()) << model.status().message();
    return *std::move(model);
  }
  testing::TemporaryDirectory directory_;
};

INSTANTIATE_TEST_SUITE_P(Devices, Speculation, ::testing::Values(TestDevice(), "remote"),
                         [](const auto& device) { return NameOfDevice(device.param); });

std::vector<std::vector<int32_t>> Prompts() {
  std::vector<int32_t> repetitive;
  for (int i = 0; i < 12; ++i) repetitive.insert(repetitive.end(), {7, 1, 30, 99, 12});
  return {repetitive, testing::TokensBelow(kVocab, 40), {5, 5, 5, 5, 5, 5}, {3, 9}};
}

std::vector<SamplingOptions> Options() {
  // So cold, and so hot, that guesses are right and wrong.
  return {{},
          {.temperature = 0.05F, .seed = 3},
          {.temperature = 0.5F, .top_k = 3, .top_p = 0.9F, .seed = 5},
          {.temperature = 0.2F, .seed = 8, .repetition_penalty = 0.5F, .frequency_penalty = -0.3F}};
}

// With windows, whose pages are dropped as the text grows, and without.
TEST_P(Speculation, TextsAreThoseWithoutIt) {
  for (const int64_t window : {0, 24}) {
    SCOPED_TRACE(window);
    const Model model = Load(window);
    Texts usual(model, Prompts(), Options());
    const auto expected = usual.Until(200);
    EXPECT_EQ(usual.guessed(), 0);
    for (const std::vector<int64_t>& most :
         {std::vector<int64_t>{8, 8, 8, 8}, {3, 0, 12, 1}, {0, 5, 0, 0}}) {
      Texts texts(model, Prompts(), Options());
      texts.Speculate(most);
      EXPECT_EQ(texts.Until(200), expected);
      EXPECT_GT(texts.guessed(), 0);
      EXPECT_LE(texts.accepted(), texts.guessed());
      if (most[2] > 0) {
        EXPECT_GT(texts.accepted(), 0);
        EXPECT_LT(texts.accepted(), texts.guessed());
      }
    }
  }
}

/// Memory for log-probabilities of a call.
struct Logprobs {
  Logprobs(size_t rows, int64_t likely)
      : of_tokens(rows, 7),
        likely_tokens(rows * static_cast<size_t>(likely)),
        of_likely(likely_tokens.size()),
        extras{{}, likely, of_tokens, likely_tokens, of_likely} {}

  std::vector<float> of_tokens;
  std::vector<int32_t> likely_tokens;
  std::vector<float> of_likely;
  SampleExtras extras;
};

/// The log softmax of a row of logits at a token.
double LogprobAt(const std::vector<float>& logits, size_t row, int32_t token) {
  const float* const first = &logits[row * kVocab];
  double sum = 0;
  for (int64_t i = 0; i < kVocab; ++i) sum += std::exp(static_cast<double>(first[i]));
  return static_cast<double>(first[token]) - std::log(sum);
}

// A prompt fed in parts gives them, and so do the tokens sampled after it, among other inputs.
TEST_P(Speculation, CallsGiveLogProbabilities) {
  const Model model = Load(24);
  const std::vector<int32_t> prompt = testing::TokensBelow(kVocab, 700);
  std::vector<float> logits(prompt.size() * kVocab);
  Sequence whole = *model.NewSequence();
  const SequenceInput all{&whole, prompt, true};
  ASSERT_TRUE(model.Forward({&all, 1}, {logits.data(), DType::kF32, {700, kVocab}}).ok());
  const int64_t bytes = *SamplerStateBytes(model.device(), kVocab);
  const DeviceBuffer memory = *DeviceBuffer::Allocate(model.device(), 2 * bytes);
  const auto state = [&](int64_t i) { return static_cast<uint8_t*>(memory.data()) + i * bytes; };
  for (const int64_t i : {0, 1}) {
    ASSERT_TRUE(ResetSampler(model.device(), {.temperature = 1, .seed = 4}, kVocab,
                             {nullptr, DType::kI32, {0}}, {state(i), DType::kU8, {bytes}})
                    .ok());
  }
  Sequence first = *model.NewSequence();
  Sequence other = *model.NewSequence();
  const std::span<const int32_t> tokens = prompt;
  // A part of the prompt alone: no token is sampled.
  Logprobs part(300, 3);
  SequenceInput input{.sequence = &first, .tokens = tokens.first(300), .all_logits = true};
  input.feed_only = true;
  input.next_token = prompt[300];
  Status status =
      model.ForwardAndSample({&input, 1}, {state(0), DType::kU8, {0, bytes}}, {}, part.extras);
  ASSERT_TRUE(status.ok()) << status.message();
  for (size_t i = 0; i < 300; ++i) {
    ASSERT_NEAR(part.of_tokens[i], LogprobAt(logits, i, prompt[i + 1]), 2e-5) << i;
    const int32_t best = part.likely_tokens[3 * i];
    ASSERT_NEAR(part.of_likely[3 * i], LogprobAt(logits, i, best), 2e-5) << i;
    ASSERT_THAT(part.of_tokens[i], ::testing::Le(part.of_likely[3 * i]));
  }
  // The rest, after another text.
  Logprobs rest(401, 0);
  const std::vector<int32_t> short_prompt = {4, 8};
  const SequenceInput inputs[] = {{&other, short_prompt}, {&first, tokens.subspan(300), true}};
  std::vector<int32_t> sampled(2);
  status = model.ForwardAndSample(inputs, {state(0), DType::kU8, {2, bytes}}, sampled, rest.extras);
  ASSERT_TRUE(status.ok()) << status.message();
  for (size_t i = 300; i < 699; ++i) {
    ASSERT_NEAR(rest.of_tokens[i - 299], LogprobAt(logits, i, prompt[i + 1]), 2e-5) << i;
  }
  EXPECT_NEAR(rest.of_tokens[400], LogprobAt(logits, 699, sampled[1]), 2e-5);
  EXPECT_THAT(rest.of_tokens[0], Lt(0.0F));
  EXPECT_EQ(first.length(), 700);
}

TEST_P(Speculation, MasksAndLogProbabilitiesOfDrafts) {
  const Model model = Load(0);
  const std::vector<std::vector<int32_t>> prompts = {Prompts()[0], Prompts()[2]};
  Texts texts(model, prompts, {{}, {.temperature = 1, .seed = 1}});
  texts.Step();
  // The second text may only go on with 64 and 65, of which it has never said anything.
  const std::vector<uint32_t> mask = {0, 0, 3, 0};
  for (int i = 0; i < 8; ++i) {
    Logprobs logprobs(2, 1);
    const std::vector<std::span<const uint32_t>> allowed = {{}, mask};
    logprobs.extras.allowed = allowed;
    texts.Step(logprobs.extras);
    EXPECT_THAT(texts.texts()[1].back(), ::testing::AnyOf(64, 65));
    EXPECT_LT(logprobs.of_tokens[1], 0.0F);
    // Greedy: the most likely token.
    EXPECT_EQ(logprobs.of_tokens[0], logprobs.of_likely[0]);
    EXPECT_EQ(logprobs.likely_tokens[0], texts.texts()[0].back());
  }
}

TEST_P(Speculation, RefusesWrongCalls) {
  const Model model = Load(0);
  Sequence sequence = *model.NewSequence();
  const std::vector<int32_t> tokens(70, 1);
  const int64_t bytes = *SamplerStateBytes(model.device(), kVocab);
  const DeviceBuffer memory = *DeviceBuffer::Allocate(model.device(), bytes);
  const auto message = [&](SequenceInput input, const SampleExtras& extras, size_t rows = 1) {
    input.sequence = &sequence;
    std::vector<int32_t> out(rows);
    const MutableTensorView states(memory.data(), DType::kU8, {input.feed_only ? 0 : 1, bytes});
    return model.ForwardAndSample({&input, 1}, states, out, extras).message();
  };
  const std::span<const int32_t> all = tokens;
  EXPECT_EQ(message({nullptr, all.first(3), false, false, 0, 65}, {}),
            "inputs[0]: drafts: expected 0..64, got 65");
  EXPECT_EQ(message({nullptr, all.first(3), false, false, 0, 1}, {}, 2),
            "inputs[0]: drafts: expected all but one of 3 tokens, got 1");
  EXPECT_EQ(message({nullptr, all.first(3), true, false, 0, 2}, {.likely = 0}),
            "inputs[0]: drafts exclude all_logits and feed_only");
  EXPECT_EQ(message({nullptr, all.first(3), false, false, 0, 2}, {}),
            "tokens: expected 3 (inputs), got 1");
  EXPECT_EQ(message({nullptr, all.first(3), true}, {}),
            "inputs[0]: all_logits cannot be combined with sampling");
  EXPECT_EQ(message({nullptr, all.first(3), true, true, 128}, {.likely = 0}, 0),
            "inputs[0]: next_token: expected 0..127, got 128");
  EXPECT_EQ(message({nullptr, all.first(3)}, {.likely = 21}), "likely: expected -1..20, got 21");
  EXPECT_EQ(message({nullptr, all.first(3)}, {.likely = 2}), "of_tokens: expected 1 (rows), got 0");
  const std::vector<uint32_t> words(3);
  const std::vector<std::span<const uint32_t>> masks = {words};
  EXPECT_EQ(message({nullptr, all.first(3)}, {.allowed = masks}),
            "allowed[0]: expected 4 words, got 3");
  EXPECT_EQ(message({nullptr, all.first(3), false, false, 0, 2}, {.allowed = masks}, 3),
            "allowed: expected 3 (tokens), got 1");
  SequenceInput draft{&sequence, all.first(2)};
  draft.drafts = 1;
  std::vector<float> logits(2 * kVocab);
  EXPECT_EQ(model.Forward({&draft, 1}, {logits.data(), DType::kF32, {2, kVocab}}).message(),
            "inputs[0]: drafts need samplers");
}

}  // namespace
}  // namespace marlin::speculation_test
