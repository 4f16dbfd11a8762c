// A batch of texts: each has the bits that it has alone, whatever runs beside it.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../../source_directory.h"
#include "../test_device.h"
#include "marlin/generate.h"
#include "marlin/model.h"
#include "marlin/sampling.h"
#include "random_model.h"

namespace marlin::batch_generation_test {
namespace {

using Prompts = std::vector<std::vector<int32_t>>;

class BatchGeneration : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    std::string path = SourceDirectory() + "/" + GetParam();
    if (std::string(GetParam()) == "qwen2") {
      path = directory_.path();
      testing::WriteQwen2(path, 40);
    }
    auto model = Model::Open(path, *Device::Open(TestDevice()), {.batch_invariant = true});
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = *std::move(model);
  }

  /// Prompts of several lengths, from different places of one text.
  Prompts MakePrompts(const std::vector<size_t>& lengths) const {
    const auto vocab = static_cast<int32_t>(model_->info().vocab_size);
    const size_t longest = *std::max_element(lengths.begin(), lengths.end());
    const std::vector<int32_t> text = testing::TokensBelow(vocab, 37 * lengths.size() + longest);
    Prompts prompts;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const auto begin = text.begin() + static_cast<std::ptrdiff_t>(37 * i);
      prompts.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(lengths[i]));
    }
    return prompts;
  }

  /// Options that differ in everything.
  static std::vector<GenerateOptions> MakeOptions(size_t count) {
    std::vector<GenerateOptions> options(count);
    for (size_t i = 0; i < count; ++i) {
      options[i].max_tokens = static_cast<int64_t>(3 + 7 * i % 19);
      options[i].ignore_eos = i % 4 != 3;
      options[i].sampling.temperature = i % 3 == 0 ? 0.0F : 0.8F;
      options[i].sampling.seed = 11 * i;
      options[i].sampling.repetition_penalty = i % 2 == 0 ? 1.3F : 1.0F;
      options[i].sampling.frequency_penalty = i % 5 == 0 ? 0.2F : 0.0F;
    }
    return options;
  }

  std::vector<Generated> Alone(const Prompts& prompts,
                               const std::vector<GenerateOptions>& options) const {
    std::vector<Generated> texts;
    for (size_t i = 0; i < prompts.size(); ++i) {
      auto text = Generate(*model_, prompts[i], options[i]);
      EXPECT_TRUE(text.ok()) << text.status().message();
      texts.push_back(*std::move(text));
    }
    return texts;
  }

  static void ExpectSame(const std::vector<Generated>& got, const std::vector<Generated>& want) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_EQ(got[i].token_ids, want[i].token_ids) << i;
      EXPECT_EQ(StopReasonName(got[i].stop_reason), StopReasonName(want[i].stop_reason)) << i;
    }
  }

  testing::TemporaryDirectory directory_;
  std::optional<Model> model_;
};

INSTANTIATE_TEST_SUITE_P(Models, BatchGeneration,
                         ::testing::Values("qwen2", "examples/tiny-qwen3-moe",
                                           "tests/data/tiny-glm4-moe"),
                         [](const auto& name) { return "Model" + std::to_string(name.index); });

TEST_P(BatchGeneration, GivesEachTextTheBitsThatItHasAlone) {
  const Prompts prompts = MakePrompts({5, 1, 90, 600, 2, 33, 17, 1, 250});
  const std::vector<GenerateOptions> options = MakeOptions(prompts.size());
  const std::vector<Generated> want = Alone(prompts, options);
  std::set<size_t> lengths;
  for (const Generated& text : want) lengths.insert(text.token_ids.size());
  EXPECT_GT(lengths.size(), 4U);
  for (const auto& [batch, prefill] :
       {std::pair<int64_t, int64_t>{0, 0}, {1, 0}, {2, 7}, {3, 1}, {4, 100}, {1000, 50}}) {
    SCOPED_TRACE(std::to_string(batch) + " at a time, " + std::to_string(prefill));
    const auto got =
        GenerateBatch(*model_, prompts, options, {.max_batch = batch, .prefill_tokens = prefill});
    ASSERT_TRUE(got.ok()) << got.status().message();
    ExpectSame(*got, want);
    for (const Generated& text : *got) {
      EXPECT_GT(text.prefill_seconds, 0);
      EXPECT_GE(text.decode_seconds, 0);
    }
  }
}

TEST_P(BatchGeneration, ReportsTokensAndEnds) {
  const Prompts prompts = MakePrompts({40, 3, 8, 21, 2, 9});
  std::vector<GenerateOptions> options(prompts.size());
  for (size_t i = 0; i < options.size(); ++i) {
    options[i].max_tokens = static_cast<int64_t>(i == 1 ? 0 : 10 + 5 * (i % 3));
    options[i].ignore_eos = true;
  }
  std::vector<std::vector<int32_t>> seen(prompts.size());
  std::vector<size_t> ends;
  std::set<size_t> running;
  size_t most = 0;
  BatchOptions batch{.max_batch = 2, .prefill_tokens = 16};
  batch.token = [&](size_t index, int32_t token) {
    running.insert(index);
    most = std::max(most, running.size());
    seen[index].push_back(token);
    return true;
  };
  batch.ended = [&](size_t index, const Generated& text) {
    running.erase(index);
    ends.push_back(index);
    EXPECT_EQ(text.token_ids, seen[index]);
    EXPECT_EQ(text.stop_reason, StopReason::kMaxTokens);
  };
  const auto texts = GenerateBatch(*model_, prompts, options, batch);
  ASSERT_TRUE(texts.ok()) << texts.status().message();
  EXPECT_EQ(most, 2U);
  // Text 1 has no tokens. Beside text 0, whose prompt is longest, text 2 starts, and so on.
  std::vector<size_t> sorted = ends;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(sorted, (std::vector<size_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(ends.front(), 1U);
  EXPECT_LT(std::find(ends.begin(), ends.end(), 0U), std::find(ends.begin(), ends.end(), 5U));
  for (size_t i = 0; i < seen.size(); ++i) EXPECT_EQ((*texts)[i].token_ids, seen[i]);
}

TEST_P(BatchGeneration, ACallbackEndsItsTextOrAll) {
  const Prompts prompts = MakePrompts({4, 30, 6, 11});
  std::vector<GenerateOptions> options = MakeOptions(prompts.size());
  for (GenerateOptions& each : options) each.max_tokens = 12, each.ignore_eos = true;
  std::vector<Generated> want = Alone(prompts, options);
  size_t tokens = 0;
  BatchOptions batch{.max_batch = 3};
  batch.token = [&](size_t index, int32_t) {
    tokens += index == 2 ? 1 : 0;
    return index != 2 || tokens < 5;
  };
  const auto one = GenerateBatch(*model_, prompts, options, batch);
  ASSERT_TRUE(one.ok()) << one.status().message();
  std::vector<Generated> shorter = want;
  shorter[2].token_ids.resize(5);
  shorter[2].stop_reason = StopReason::kCallback;
  ExpectSame(*one, shorter);

  tokens = 0;
  std::vector<size_t> ends;
  batch.token = [&](size_t, int32_t) { return ++tokens > 0; };
  batch.stop = [&] { return tokens >= 9; };
  batch.ended = [&](size_t index, const Generated&) { ends.push_back(index); };
  const auto all = GenerateBatch(*model_, prompts, options, batch);
  ASSERT_TRUE(all.ok()) << all.status().message();
  EXPECT_EQ(ends, (std::vector<size_t>{0, 1, 2, 3}));
  size_t kept = 0;
  for (size_t i = 0; i < all->size(); ++i) {
    const std::vector<int32_t>& ids = (*all)[i].token_ids;
    EXPECT_EQ((*all)[i].stop_reason, StopReason::kCallback);
    EXPECT_TRUE(std::equal(ids.begin(), ids.end(), want[i].token_ids.begin())) << i;
    kept += ids.size();
  }
  EXPECT_EQ(kept, tokens);
  EXPECT_TRUE(all->back().token_ids.empty());  // It never started.
}

TEST_P(BatchGeneration, EndsAtStopTokensAndTheEndOfTheContext) {
  const int64_t context = model_->info().max_positions;
  Prompts prompts = MakePrompts({7, static_cast<size_t>(context), 12});
  prompts.push_back(MakePrompts({static_cast<size_t>(context - 3)}).front());
  std::vector<GenerateOptions> options(prompts.size());
  for (GenerateOptions& each : options) each.max_tokens = 20;
  options[1].ignore_eos = options[3].ignore_eos = true;
  const auto free = Generate(*model_, prompts[0], {.max_tokens = 20, .ignore_eos = true});
  ASSERT_TRUE(free.ok());
  options[0].stop_token_ids = {free->token_ids[4], free->token_ids[9]};
  const std::vector<Generated> want = Alone(prompts, options);
  EXPECT_EQ(want[0].stop_reason, StopReason::kStopToken);
  EXPECT_EQ(want[1].token_ids.size(), 1U);
  EXPECT_EQ(want[1].stop_reason, StopReason::kContextFull);
  EXPECT_EQ(want[3].token_ids.size(), 4U);
  const auto got = GenerateBatch(*model_, prompts, options, {.max_batch = 3});
  ASSERT_TRUE(got.ok()) << got.status().message();
  ExpectSame(*got, want);
}

TEST_P(BatchGeneration, OneOptionIsForAllAndNoneIsTheDefault) {
  const Prompts prompts = MakePrompts({3, 3, 5});
  const GenerateOptions options{
      .max_tokens = 6, .sampling = {.temperature = 1.0F, .seed = 4}, .ignore_eos = true};
  const auto got = GenerateBatch(*model_, prompts, {&options, 1});
  ASSERT_TRUE(got.ok()) << got.status().message();
  ExpectSame(*got, Alone(prompts, std::vector<GenerateOptions>(3, options)));
  const auto plain = GenerateBatch(*model_, prompts);
  ASSERT_TRUE(plain.ok()) << plain.status().message();
  ExpectSame(*plain, Alone(prompts, std::vector<GenerateOptions>(3)));
  const auto none = GenerateBatch(*model_, {}, {&options, 1});
  ASSERT_TRUE(none.ok()) << none.status().message();
  EXPECT_TRUE(none->empty());
}

TEST_P(BatchGeneration, ErrorsNameThePrompt) {
  const auto error = [&](const Prompts& prompts, const std::vector<GenerateOptions>& options,
                         const BatchOptions& batch = {}) {
    const auto texts = GenerateBatch(*model_, prompts, options, batch);
    EXPECT_EQ(texts.status().code(), Code::kInvalidArgument);
    return texts.status().message();
  };
  const auto vocab = static_cast<int32_t>(model_->info().vocab_size);
  EXPECT_EQ(error({{1}, {2, vocab}}, {}), "prompts[1]: token 1 is " + std::to_string(vocab) +
                                              ", expected 0.." + std::to_string(vocab - 1));
  EXPECT_EQ(error({{1}, {2}, {}}, {}), "prompts[2]: no tokens");
  const auto context = static_cast<size_t>(model_->info().max_positions);
  EXPECT_EQ(error({std::vector<int32_t>(context + 1, 1)}, {}),
            "prompts[0]: " + std::to_string(context + 1) + " tokens do not fit in a context of " +
                std::to_string(context));
  GenerateOptions wrong;
  wrong.max_tokens = -1;
  EXPECT_EQ(error({{1}, {2}}, {wrong}), "max_tokens: expected 0 or more, got -1");
  EXPECT_EQ(error({{1}, {2}}, {{}, wrong}), "options[1]: max_tokens: expected 0 or more, got -1");
  EXPECT_EQ(error({{1}}, {{}, {}}), "options: expected 1 or 1 (prompts), got 2");
  EXPECT_EQ(error({{1}}, {}, {.max_batch = -1}), "max_batch: expected 0 or more, got -1");
  EXPECT_EQ(error({{1}}, {}, {.prefill_tokens = -2}), "prefill_tokens: expected 0 or more, got -2");
  const Model moved = std::move(*model_);
  EXPECT_EQ(GenerateBatch(*model_, {}).status().message(), "model: was moved from");
}

TEST_P(BatchGeneration, TokensThatAreOnlyFedGiveNothing) {
  const std::vector<int32_t> prompt = MakePrompts({12}).front();
  const int64_t vocab = model_->info().vocab_size;
  const SamplingOptions options{.temperature = 1.0F, .seed = 5};
  const int64_t bytes = *SamplerStateBytes(model_->device(), vocab);
  const DeviceBuffer states = *DeviceBuffer::Allocate(model_->device(), bytes);
  const MutableTensorView state(states.data(), DType::kU8, {1, bytes});
  const auto sample = [&](std::span<const SequenceInput> before,
                          std::span<const SequenceInput> inputs) {
    EXPECT_TRUE(ResetSampler(model_->device(), options, vocab, {nullptr, DType::kI32, {0}},
                             {states.data(), DType::kU8, {bytes}})
                    .ok());
    if (!before.empty()) {
      const MutableTensorView none(states.data(), DType::kU8, {0, bytes});
      const Status fed = model_->ForwardAndSample(before, none, {});
      EXPECT_TRUE(fed.ok()) << fed.message();
    }
    int32_t token = -1;
    const Status status = model_->ForwardAndSample(inputs, state, {&token, 1});
    EXPECT_TRUE(status.ok()) << status.message();
    return token;
  };
  Sequence whole = *model_->NewSequence();
  const SequenceInput at_once{&whole, prompt};
  const int32_t want = sample({}, {&at_once, 1});
  Sequence a = *model_->NewSequence();
  Sequence b = *model_->NewSequence();
  const auto part = [&](size_t first, size_t count) {
    return std::span(prompt).subspan(first, count);
  };
  const SequenceInput first{.sequence = &a, .tokens = part(0, 7), .feed_only = true};
  const SequenceInput both[] = {{.sequence = &b, .tokens = part(0, 12), .feed_only = true},
                                {&a, part(7, 5)}};
  EXPECT_EQ(sample({&first, 1}, both), want);
  EXPECT_EQ(a.length(), 12);
  EXPECT_EQ(b.length(), 12);

  Sequence c = *model_->NewSequence();
  Sequence d = *model_->NewSequence();
  const SequenceInput mixed[] = {{.sequence = &c, .tokens = part(0, 12), .feed_only = true},
                                 {&d, part(0, 12)}};
  std::vector<float> logits(static_cast<size_t>(vocab));
  const MutableTensorView row(logits.data(), DType::kF32, {1, vocab});
  const Status forward = model_->Forward(mixed, row);
  EXPECT_TRUE(forward.ok()) << forward.message();
  Sequence e = *model_->NewSequence();
  const SequenceInput last{&e, prompt};
  std::vector<float> expected(logits.size());
  ASSERT_TRUE(model_->Forward({&last, 1}, {expected.data(), DType::kF32, {1, vocab}}).ok());
  EXPECT_EQ(logits, expected);
  EXPECT_EQ(model_->Forward({&last, 1}, {expected.data(), DType::kF32, {0, vocab}}).message(),
            "logits: expected f32 [1, " + std::to_string(vocab) + "], got f32 [0, " +
                std::to_string(vocab) + "]");
  const SequenceInput wrong{&e, prompt, true, true};
  EXPECT_EQ(model_->Forward({&wrong, 1}, row).message(),
            "inputs[0]: feed_only excludes all_logits");
  int32_t token = 0;
  EXPECT_EQ(model_->ForwardAndSample({&first, 1}, state, {&token, 1}).message(),
            "tokens: expected 0 (inputs), got 1");
}

// Without batch invariance too, the passes of a batch are the same on every run.
TEST_P(BatchGeneration, RunsRepeatWithoutBatchInvariance) {
  std::string path = SourceDirectory() + "/" + GetParam();
  if (std::string(GetParam()) == "qwen2") path = directory_.path();
  const auto model = Model::Open(path, model_->device());
  ASSERT_TRUE(model.ok()) << model.status().message();
  const Prompts prompts = MakePrompts({5, 90, 33, 17, 1, 250});
  const std::vector<GenerateOptions> options = MakeOptions(prompts.size());
  const auto first = GenerateBatch(*model, prompts, options, {.max_batch = 4});
  ASSERT_TRUE(first.ok()) << first.status().message();
  const auto second = GenerateBatch(*model, prompts, options, {.max_batch = 4});
  ASSERT_TRUE(second.ok()) << second.status().message();
  ExpectSame(*second, *first);
}

}  // namespace
}  // namespace marlin::batch_generation_test
