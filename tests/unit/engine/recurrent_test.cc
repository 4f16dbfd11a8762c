// Models with recurrent states: however tokens are divided into calls and passes, with whatever
// others, and after calls that failed, every bit is as in a sequence alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "../checkpoint/test_files.h"
#include "engine/kv_cache.h"
#include "engine/model_impl.h"
#include "marlin/generate.h"
#include "marlin/model.h"
#include "marlin/scheduler.h"
#include "random_model.h"
#include "recurrent_model.h"
#include "remote_backend.h"

namespace marlin::recurrent_test {
namespace {

using ::testing::HasSubstr;
using Tokens = std::vector<int32_t>;
using Logits = std::vector<float>;

constexpr int64_t kVocab = 128;

ModelOptions Invariant() {
  ModelOptions options;
  options.batch_invariant = true;
  return options;
}

/// Layer 0 attends to all tokens, layer 1 is recurrent, layer 2 has a window.
class Recurrent : public ::testing::Test {
 protected:
  void SetUp() override {
    testing::WriteQwen2(directory_.path(), 40);
    model_ = Open(*Device::Open("cpu", {.threads = 2}));
  }

  Model Open(const Device& device, int64_t most_bytes = INT64_MAX) const {
    auto model = testing::OpenRecurrent(directory_.path(), device, Invariant(), {1}, most_bytes);
    EXPECT_TRUE(model.ok()) << model.status().message();
    return *model;
  }
  static const PagePool& PoolOf(const Model& model) { return *Internals::Impl(model).pool; }
  static Tokens Text(size_t count, size_t seed = 0) {
    const Tokens all = testing::TokensBelow(kVocab, count + 31 * seed);
    return {all.end() - static_cast<std::ptrdiff_t>(count), all.end()};
  }

  /// All logits of tokens that sequences are fed in one call.
  static Result<Logits> Feed(const Model& model, std::vector<SequenceInput> inputs) {
    int64_t rows = 0;
    for (SequenceInput& input : inputs) {
      input.all_logits = true;
      rows += std::ssize(input.tokens);
    }
    Logits logits(static_cast<size_t>(rows * kVocab));
    MARLIN_RETURN_IF_ERROR(model.Forward(inputs, {logits.data(), DType::kF32, {rows, kVocab}}));
    return logits;
  }
  static Logits MustFeed(const Model& model, const std::vector<SequenceInput>& inputs) {
    Result<Logits> logits = Feed(model, inputs);
    EXPECT_TRUE(logits.ok()) << logits.status().message();
    return logits.ok() ? *logits : Logits();
  }
  static Logits Last(const Logits& logits, size_t rows = 1) {
    return {logits.end() - static_cast<std::ptrdiff_t>(rows * kVocab), logits.end()};
  }
  /// The logits of a text that is fed token by token.
  static Logits Alone(const Model& model, const Tokens& tokens) {
    Sequence sequence = *model.NewSequence();
    Logits logits;
    for (const int32_t& token : tokens) {
      const Logits one = MustFeed(model, {{&sequence, {&token, 1}}});
      logits.insert(logits.end(), one.begin(), one.end());
    }
    return logits;
  }

  testing::TemporaryDirectory directory_;
  std::optional<Model> model_;
};

/// The same, or a model of a type with a recurrent mixer.
class RecurrentModels : public Recurrent, public ::testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    if (std::string(GetParam()) == "fading_sum") return Recurrent::SetUp();
    testing::WriteRecurrent(GetParam(), directory_.path(), kVocab);
    auto model = Model::Open(directory_.path(), *Device::Open("cpu", {.threads = 2}), Invariant());
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = *std::move(model);
  }
};

INSTANTIATE_TEST_SUITE_P(All, RecurrentModels,
                         ::testing::Values("fading_sum", "qwen3_next", "granitemoehybrid", "lfm2",
                                           "nemotron_h"),
                         [](const auto& of) { return std::string(of.param); });

TEST_P(RecurrentModels, PiecesAndBatchesHaveTheBitsOfSingleTokens) {
  const Tokens tokens = Text(90);
  const Tokens other = Text(70, 3);
  const Logits alone = Alone(*model_, tokens);
  for (const size_t piece : {size_t{90}, size_t{33}, size_t{7}}) {
    Sequence sequence = *model_->NewSequence();
    Sequence beside = *model_->NewSequence();
    Logits logits;
    for (size_t first = 0; first < tokens.size(); first += piece) {
      const size_t count = std::min(piece, tokens.size() - first);
      const std::span<const int32_t> next(tokens.data() + first, count);
      const Logits both = MustFeed(*model_, {{&beside, other}, {&sequence, next}});
      const Logits own = Last(both, count);
      logits.insert(logits.end(), own.begin(), own.end());
    }
    EXPECT_EQ(logits, alone) << piece;
  }
  EXPECT_EQ(PoolOf(*model_).statistics().states_used, 0);
}

TEST_F(Recurrent, PassesOfOneCallGoOnFromEachOther) {
  testing::RemoteOptions options;
  options.pass_tokens = 16;
  const Model small = Open(testing::OpenRemote(options));
  const Tokens tokens = Text(90);
  Sequence first = *small.NewSequence();
  Sequence second = *small.NewSequence();
  const Tokens other = Text(21, 2);
  const Logits logits = MustFeed(small, {{&first, other}, {&second, tokens}});
  EXPECT_EQ(Last(logits, tokens.size()), Alone(small, tokens));
  EXPECT_EQ(PoolOf(small).statistics().states_used, 2);
}

TEST_F(Recurrent, FailedCallsLeaveTheState) {
  int64_t left = INT64_MAX;
  testing::RemoteOptions options;
  options.pass_tokens = 16;
  options.fails = [&left] {
    return --left == 0 ? Status(Code::kUnsupported, "test: fails") : Status();
  };
  const Model model = Open(testing::OpenRemote(options));
  const Tokens tokens = Text(60);
  const Logits alone = Alone(model, tokens);
  Sequence sequence = *model.NewSequence();
  MustFeed(model, {{&sequence, std::span(tokens).first(20)}});
  int failures = 0;
  for (int64_t operation = 1;; operation += 7) {
    left = operation;
    const auto logits = Feed(model, {{&sequence, std::span(tokens).subspan(20)}});
    if (logits.ok()) {
      EXPECT_EQ(Last(*logits), Last(alone));
      break;
    }
    ++failures;
    EXPECT_EQ(sequence.length(), 20);
    EXPECT_EQ(PoolOf(model).statistics().states_used, 1);
  }
  EXPECT_GT(failures, 3);
}

TEST_P(RecurrentModels, TruncatesToKeptStatesOnly) {
  const int64_t page = PoolOf(*model_).page_tokens();
  const Tokens tokens = Text(static_cast<size_t>(page) + 50);
  const Logits alone = Alone(*model_, tokens);
  Sequence sequence = *model_->NewSequence();
  KvCache& cache = sequence.state()->cache;
  EXPECT_EQ(cache.Adopt(tokens, ""), 0);
  for (const int64_t end : {page, page + 50}) {
    const auto count = static_cast<size_t>(end - sequence.length());
    MustFeed(*model_, {{&sequence,
                        std::span(tokens).subspan(static_cast<size_t>(sequence.length()), count)}});
    cache.Publish(tokens);
  }
  EXPECT_TRUE(sequence.Truncate(page + 50).ok());
  for (const int64_t length : {page + 49, page + 1}) {
    const Status status = sequence.Truncate(length);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("the recurrent state after " + std::to_string(length)));
    EXPECT_EQ(sequence.length(), page + 50);
  }
  ASSERT_TRUE(sequence.Truncate(page).ok());
  const auto rest = std::span(tokens).subspan(static_cast<size_t>(page));
  EXPECT_EQ(MustFeed(*model_, {{&sequence, rest}}), Last(alone, 50));
  ASSERT_TRUE(sequence.Truncate(0).ok());
  EXPECT_EQ(MustFeed(*model_, {{&sequence, tokens}}), alone);
}

TEST_F(Recurrent, APassThatGoesOnFromAnotherIsNotRepeated) {
  int64_t left = INT64_MAX;
  testing::RemoteOptions options;
  options.pass_tokens = 16;
  options.fails = [&left] {
    return --left == 0 ? Status(Code::kOutOfMemory, "test: no memory") : Status();
  };
  const Model model = Open(testing::OpenRemote(options));
  const auto page = static_cast<size_t>(PoolOf(model).page_tokens());
  const Tokens tokens = Text(40);
  const Logits alone = Alone(model, tokens);
  const Tokens cached = Text(page + 1, 3);
  std::set<bool> results;
  for (int64_t operation = 1; operation < 150; operation += 7) {
    left = INT64_MAX;
    {
      // Pages that are given up where memory runs out, after which a pass may be repeated.
      Sequence other = *model.NewSequence();
      EXPECT_EQ(other.state()->cache.Adopt(cached, ""), 0);
      MustFeed(model, {{&other, cached}});
      other.state()->cache.Publish(cached);
    }
    Sequence sequence = *model.NewSequence();
    left = operation;
    const auto logits = Feed(model, {{&sequence, tokens}});
    results.insert(logits.ok());
    if (logits.ok()) {
      EXPECT_EQ(*logits, alone) << operation;
    } else {
      EXPECT_EQ(sequence.length(), 0);
      left = INT64_MAX;
      EXPECT_EQ(MustFeed(model, {{&sequence, tokens}}), alone) << operation;
    }
    Internals::Impl(model).pool->DropCached();
  }
  EXPECT_EQ(results.size(), 2U);
}

/// Some sequences that decode with samplers of their own.
class Decoding {
 public:
  Decoding(const Model& model, const std::vector<Tokens>& prompts)
      : model_(model),
        bytes_(*SamplerStateBytes(model.device(), kVocab)),
        memory_(*DeviceBuffer::Allocate(model.device(), bytes_ * std::ssize(prompts))),
        next_(prompts.size()) {
    std::vector<SequenceInput> inputs;
    for (size_t i = 0; i < prompts.size(); ++i) {
      sequences_.push_back(*model.NewSequence());
      const auto count = static_cast<int64_t>(prompts[i].size());
      const DeviceBuffer prompt = *DeviceBuffer::Allocate(model.device(), 4 * count);
      EXPECT_TRUE(prompt.CopyFrom(prompts[i].data(), 4 * count).ok());
      auto* const state = static_cast<uint8_t*>(memory_.data()) + static_cast<int64_t>(i) * bytes_;
      SamplingOptions sampling;
      sampling.temperature = 0.9F;
      sampling.seed = i;
      EXPECT_TRUE(ResetSampler(model.device(), sampling, kVocab,
                               {prompt.data(), DType::kI32, {count}}, {state, DType::kU8, {bytes_}})
                      .ok());
      EXPECT_TRUE(model.device().Synchronize().ok());
    }
    for (size_t i = 0; i < prompts.size(); ++i) inputs.push_back({&sequences_[i], prompts[i]});
    EXPECT_TRUE(model.ForwardAndSample(inputs, samplers(), next_).ok());
    for (size_t i = 0; i < prompts.size(); ++i) fed.push_back(prompts[i]);
  }

  MutableTensorView samplers() const {
    return {memory_.data(), DType::kU8, {std::ssize(sequences_), bytes_}};
  }
  /// Decodes; `fed` gets the tokens that the sequences have.
  Status Run(int64_t steps, const Tokens& stops) {
    std::vector<DecodeInput> inputs;
    for (size_t i = 0; i < sequences_.size(); ++i) inputs.push_back({&sequences_[i], next_[i]});
    Tokens tokens(sequences_.size() * static_cast<size_t>(steps));
    counts.assign(sequences_.size(), 0);
    Status status = model_.Decode(inputs, samplers(), {steps, stops}, tokens, counts);
    for (size_t i = 0; i < sequences_.size(); ++i) {
      const auto first = tokens.begin() + static_cast<std::ptrdiff_t>(i) * steps;
      if (counts[i] == 0) continue;
      fed[i].push_back(next_[i]);
      fed[i].insert(fed[i].end(), first, first + counts[i] - 1);
      next_[i] = first[counts[i] - 1];
    }
    return status;
  }
  Sequence& sequence(size_t i) { return sequences_[i]; }
  int32_t next(size_t i) const { return next_[i]; }

  std::vector<Tokens> fed;
  std::vector<int64_t> counts;

 private:
  const Model& model_;
  int64_t bytes_;
  DeviceBuffer memory_;
  std::vector<Sequence> sequences_;
  Tokens next_;
};

TEST_F(Recurrent, StepsOfOneLaunchAreSingleSteps) {
  testing::RemoteOptions records;
  records.records = true;
  const Device device = testing::OpenRemote(records);
  const Model recording = Open(device);
  const Model single = Open(testing::OpenRemote());
  const std::vector<Tokens> prompts = {Text(20), Text(5, 2), Text(33, 4)};
  Decoding steps(recording, prompts);
  Decoding singles(single, prompts);
  for (int call = 0; call < 6; ++call) {
    // Tokens that end a text within a launch: it goes on with the next call.
    const Tokens stops = call % 2 == 0 ? Tokens() : Tokens{singles.next(0), 7, 19, 40, 90};
    ASSERT_TRUE(steps.Run(16, stops).ok());
    ASSERT_TRUE(singles.Run(16, stops).ok());
    EXPECT_EQ(steps.counts, singles.counts);
    EXPECT_EQ(steps.fed, singles.fed);
  }
  EXPECT_GT(testing::RemoteOf(device).recordings(), 0);
  const int32_t token = 3;
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(steps.sequence(i).length(), std::ssize(steps.fed[i]));
    const SequenceInput next{&steps.sequence(i), {&token, 1}};
    steps.fed[i].push_back(token);
    EXPECT_EQ(MustFeed(recording, {next}), Last(Alone(single, steps.fed[i])));
  }
  EXPECT_EQ(PoolOf(recording).statistics().states_used, 3);
}

TEST_F(Recurrent, RowsThatCannotBeSampledKeepTheStateOfTheirTokens) {
  const std::vector<Tokens> prompts = {Text(20), Text(5, 2)};
  // A token that the first text samples within a launch gets an embedding without a number.
  Decoding known(*model_, prompts);
  ASSERT_TRUE(known.Run(16, {}).ok());
  const Tokens& text = known.fed[0];
  const auto is_new = [&](size_t at) {
    const auto before = text.begin() + static_cast<std::ptrdiff_t>(at);
    return std::find(text.begin(), before, text[at]) == before &&
           std::find(known.fed[1].begin(), known.fed[1].end(), text[at]) == known.fed[1].end();
  };
  size_t at = prompts[0].size() + 3;
  while (at < text.size() && !is_new(at)) ++at;
  ASSERT_LT(at, text.size());
  testing::WriteQwen2(directory_.path(), 40, text[at]);

  testing::RemoteOptions records;
  records.records = true;
  const Model recording = Open(testing::OpenRemote(records));
  Decoding steps(recording, prompts);
  const Status status = steps.Run(16, {});
  EXPECT_EQ(status.code(), Code::kNonFiniteInput) << status.message();
  EXPECT_EQ(steps.counts[1], 16);
  EXPECT_EQ(steps.sequence(0).length(), static_cast<int64_t>(at));
  EXPECT_EQ(steps.fed[0], Tokens(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at)));
  const int32_t token = 3;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const SequenceInput next{&steps.sequence(i), {&token, 1}};
    steps.fed[i].push_back(token);
    EXPECT_EQ(MustFeed(recording, {next}), Last(Alone(recording, steps.fed[i]))) << i;
  }
}

/// Submits requests one after another or at once, and returns their texts and cached tokens.
class Requests {
 public:
  struct Text {
    Tokens tokens;
    int64_t cached = 0;
    Status status;
  };
  explicit Requests(const Model& model, const SchedulerOptions& options = {})
      : scheduler(*Scheduler::Make(model, options)) {}

  static Request Of(Tokens prompt) {
    Request request;
    request.prompt = std::move(prompt);
    request.options.max_tokens = 12;
    request.options.ignore_eos = true;
    return request;
  }
  std::vector<Text> Run(const std::vector<Tokens>& prompts) {
    std::vector<Text> texts(prompts.size());
    std::vector<int64_t> ids;
    for (const Tokens& prompt : prompts) ids.push_back(**scheduler.Submit(Of(prompt)));
    for (SchedulerStatistics now = scheduler.statistics(); now.running + now.waiting > 0;
         now = scheduler.statistics()) {
      std::vector<Event> events;
      EXPECT_TRUE(scheduler.Step(std::chrono::milliseconds(0), &events).ok());
      for (const Event& event : events) {
        Text& text = texts[static_cast<size_t>(event.id - ids.front())];
        text.tokens.insert(text.tokens.end(), event.tokens.begin(), event.tokens.end());
        text.cached = event.cached_tokens;
        text.status = event.status;
      }
    }
    return texts;
  }

  Scheduler scheduler;
};

void ExpectAlone(const Model& model, const Tokens& prompt, const Requests::Text& got) {
  EXPECT_TRUE(got.status.ok()) << got.status.message();
  const auto alone = Generate(model, prompt, Requests::Of(prompt).options);
  ASSERT_TRUE(alone.ok()) << alone.status().message();
  EXPECT_EQ(got.tokens, alone->token_ids);
}

TEST_P(RecurrentModels, RequestsGoOnFromPublishedStates) {
  const auto page = static_cast<size_t>(PoolOf(*model_).page_tokens());
  Requests requests(*model_);
  const Tokens text = Text(2 * page + 60);
  Tokens branch = text;
  branch.back() = (branch.back() + 1) % kVocab;
  // The tokens of its first page are there, but no state after them.
  const Tokens shorter(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(page) + 30);
  const Tokens prompts[] = {text, branch, shorter, text, shorter};
  const size_t cached[] = {0, 2 * page, 0, 2 * page, page};
  for (size_t i = 0; i < std::size(prompts); ++i) {
    const Requests::Text got = requests.Run({prompts[i]}).front();
    EXPECT_EQ(got.cached, static_cast<int64_t>(cached[i])) << i;
    ExpectAlone(*model_, prompts[i], got);
  }
  const PoolStatistics statistics = PoolOf(*model_).statistics();
  EXPECT_EQ(statistics.states_used, 0);
  EXPECT_EQ(statistics.states_cached, 2);
}

TEST_F(Recurrent, StatesCountOncePerSequence) {
  testing::WriteQwen3Next(directory_.path(), kVocab);
  const auto model = Model::Open(directory_.path(), *Device::Open("cpu", {.threads = 1}));
  ASSERT_TRUE(model.ok()) << model.status().message();
  const int64_t convolution = 3 * (2 * 2 * 16 + 4 * 24);
  EXPECT_EQ(convolution % 32, 0);
  EXPECT_EQ(model->info().state_bytes_per_sequence, 3 * 4 * (convolution + 4 * 16 * 24));
  EXPECT_EQ(model->info().kv_cache_bytes_per_token, 2 * 2 * 32 * 2);
}

TEST_F(Recurrent, LongPromptsPublishStatesOnTheirWay) {
  const auto page = static_cast<size_t>(PoolOf(*model_).page_tokens());
  Requests requests(*model_);
  const Tokens text = Text(17 * page + 9);
  ExpectAlone(*model_, text, requests.Run({text}).front());
  Tokens other(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(16 * page) + 40);
  other.back() = (other.back() + 1) % kVocab;
  const Requests::Text got = requests.Run({other}).front();
  EXPECT_EQ(got.cached, static_cast<int64_t>(16 * page));
  ExpectAlone(*model_, other, got);
}

TEST_F(Recurrent, RequestsThatAreCancelledOrPutBackLeaveNothing) {
  const auto page = static_cast<size_t>(PoolOf(*model_).page_tokens());
  // Room for about two of these texts.
  const PageMemory sizes = *PageMemory::Make(model_->device(), [&] {
    CacheShape shape = CacheShape::Of(Internals::Impl(*model_).decoder.config, DType::kBf16);
    return shape;
  }());
  const int64_t bytes = 9 * sizes.PageBytes(0);
  const Model model = Open(*Device::Open("cpu", {.threads = 2}), bytes);
  Requests requests(model);
  std::vector<Tokens> prompts;
  for (size_t i = 0; i < 5; ++i) prompts.push_back(Text(page + 20 + 30 * i, i));
  prompts.push_back(prompts.front());
  const std::vector<Requests::Text> got = requests.Run(prompts);
  for (size_t i = 0; i < prompts.size(); ++i) ExpectAlone(*model_, prompts[i], got[i]);
  EXPECT_GT(requests.scheduler.statistics().put_back, 0);

  const int64_t id = **requests.scheduler.Submit(Requests::Of(Text(3 * page, 9)));
  std::vector<Event> events;
  ASSERT_TRUE(requests.scheduler.Step(std::chrono::milliseconds(0), &events).ok());
  EXPECT_GT(PoolOf(model).statistics().states_used, 0);
  requests.scheduler.Cancel(id);
  ASSERT_TRUE(requests.scheduler.Step(std::chrono::milliseconds(0), &events).ok());
  EXPECT_EQ(PoolOf(model).statistics().states_used, 0);
  EXPECT_EQ(PoolOf(model).statistics().pages_used, 0);
}

}  // namespace
}  // namespace marlin::recurrent_test
