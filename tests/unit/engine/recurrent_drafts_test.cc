// Guesses for models with recurrent states, and by drafts that have some: the texts are those
// without guesses, whichever of them are accepted.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "../checkpoint/test_files.h"
#include "../test_device.h"
#include "drafted_batch.h"
#include "engine/kv_cache.h"
#include "engine/model_impl.h"
#include "engine/recurrent_turns.h"
#include "marlin/generate.h"
#include "marlin/model.h"
#include "marlin/scheduler.h"
#include "random_model.h"
#include "recurrent_model.h"
#include "remote_backend.h"

namespace marlin::recurrent_drafts_test {
namespace {

using ::testing::ElementsAre;
using Tokens = std::vector<int32_t>;

constexpr int64_t kVocab = 128;

Tokens Repetitive() {
  Tokens tokens;
  for (int i = 0; i < 6; ++i) tokens.insert(tokens.end(), {7, 1, 30, 99, 12});
  return tokens;
}

std::vector<int64_t> FirstRows(const std::vector<PlannedTurn>& turns) {
  std::vector<int64_t> firsts;
  for (const PlannedTurn& turn : turns) firsts.push_back(turn.first);
  return firsts;
}

TEST(RecurrentTurns, RowsOfGuessesFollowEachOther) {
  // Rows 0 to 4 of two prompts, 5 to 10 of two texts with guesses, 11 to 12, 13.
  const std::vector<PassSequence> sequences = {{4, 9},    {1, 30},     {3, 12, 2},
                                               {3, 8, 2}, {2, 100, 1}, {1, 3}};
  const std::vector<PlannedTurn> turns = PlanTurns(sequences);
  EXPECT_THAT(FirstRows(turns), ElementsAre(0, 5, 6, 7, 11, 12, 13));
  EXPECT_THAT(FirstRowsOf(turns[0], sequences), ElementsAre(0, 4, 5));
  EXPECT_EQ(turns[0].row, PlannedTurn::kAllRows);
  for (size_t row = 0; row < 3; ++row) {
    const PlannedTurn& turn = turns[1 + row];
    EXPECT_EQ(turn.row, static_cast<int64_t>(row));
    EXPECT_EQ(turn.stride, 3);
    EXPECT_EQ(turn.rows, 2);
    EXPECT_THAT(FirstRowsOf(turn, sequences), ElementsAre(0, 1, 2));
  }
  EXPECT_EQ(turns[5].first_sequence, 4U);
  EXPECT_EQ(turns[6].rows, 1);
}

/// A model whose second layer is a fading sum, on the CPU or a device that records passes, or one
/// of a type with recurrent mixers.
class RecurrentDrafts : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    model_ = Open(directory_.path(), kVocab);
    twin_ = Open(directory_.path(), kVocab);
    stranger_ = Open(other_.path(), kVocab + 8);
  }
  static bool IsFadingSum() { return GetParam() == "fading_sum" || GetParam() == "remote"; }
  Model Open(const std::string& path, int64_t vocab, int64_t most_bytes = INT64_MAX) {
    if (IsFadingSum()) {
      testing::WriteQwen2(path, vocab == kVocab ? 40 : 7);
    } else {
      testing::WriteRecurrent(GetParam(), path, vocab);
    }
    const Device device = GetParam() == "remote" ? testing::OpenRemote({.records = true})
                          : IsFadingSum()        ? *Device::Open("cpu", {.threads = 2})
                                                 : *Device::Open(TestDevice(), {.threads = 2});
    const ModelOptions options{.batch_invariant = true};
    auto model = IsFadingSum() ? testing::OpenRecurrent(path, device, options, {1}, most_bytes)
                               : Model::Open(path, device, options);
    EXPECT_TRUE(model.ok()) << model.status().message();
    return *std::move(model);
  }
  static Generated Must(const Result<Generated>& made) {
    EXPECT_TRUE(made.ok()) << made.status().message();
    return made.ok() ? *made : Generated();
  }
  static PoolStatistics StatesOf(const Model& model) {
    return Internals::Impl(model).pool->statistics();
  }

  testing::TemporaryDirectory directory_;
  testing::TemporaryDirectory other_;
  std::optional<Model> model_;
  std::optional<Model> twin_;
  std::optional<Model> stranger_;
};

INSTANTIATE_TEST_SUITE_P(All, RecurrentDrafts,
                         ::testing::Values("fading_sum", "remote", "qwen3_next", "granitemoehybrid",
                                           "lfm2", "nemotron_h"),
                         [](const auto& of) { return of.param; });

TEST_P(RecurrentDrafts, TextsAreThoseWithoutThem) {
  int64_t wrong = 0;
  for (const SamplingOptions& sampling :
       {SamplingOptions(), SamplingOptions{.temperature = 0.7F, .seed = 5}}) {
    GenerateOptions options{.max_tokens = 40, .sampling = sampling};
    const Generated plain = Must(Generate(*model_, Repetitive(), options));
    for (const auto& draft : {std::optional<Model>(), twin_, stranger_}) {
      for (const bool always : {false, true}) {
        options.speculation = testing::SpeculateBy(draft, always);
        const Generated made = Must(Generate(*model_, Repetitive(), options));
        EXPECT_EQ(made.token_ids, plain.token_ids);
        wrong += made.drafts.drafted - made.drafts.accepted;
      }
    }
    options.speculation = testing::SpeculateBy(twin_);
    const DraftCounts twins = Must(Generate(*model_, Repetitive(), options)).drafts;
    EXPECT_EQ(twins.accepted, twins.drafted);
    EXPECT_EQ(twins.passes, 7);  // After the first token, six at a time.
  }
  EXPECT_GT(wrong, 0);
  EXPECT_EQ(StatesOf(*model_).states_used, 0);
  EXPECT_EQ(StatesOf(*twin_).states_used, 0);
}

TEST_P(RecurrentDrafts, OfManyTextsToo) {
  const std::vector<Tokens> prompts = {
      Repetitive(), {5, 9, 2}, testing::TokensBelow(kVocab, 70), {7, 7, 7}, {99, 12, 7, 1}};
  testing::ExpectDraftedBatch(*model_, *twin_, *stranger_, prompts);
}

/// Texts of one batch may have different drafts.
TEST_P(RecurrentDrafts, OfSeveralModelsInABatch) {
  const std::vector<Tokens> prompts = {Repetitive(), {5, 9, 2}, {7, 7, 7, 7}, {99, 12, 7, 1}};
  std::vector<GenerateOptions> options(prompts.size(), GenerateOptions{.max_tokens = 18});
  const auto plain = GenerateBatch(*model_, prompts, options);
  ASSERT_TRUE(plain.ok()) << plain.status().message();
  options[0].speculation = testing::SpeculateBy(twin_);
  options[1].speculation = testing::SpeculateBy(stranger_);
  options[2].speculation = testing::SpeculateBy(std::nullopt);
  const auto made = GenerateBatch(*model_, prompts, options);
  ASSERT_TRUE(made.ok()) << made.status().message();
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ((*made)[i].token_ids, (*plain)[i].token_ids) << i;
    // On other devices a text need not repeat itself.
    if (i == 2 && OnOtherDevice()) continue;
    EXPECT_EQ((*made)[i].drafts.drafted > 0, i < 3) << i;
  }
}

/// A draft whose cache has no room for all texts guesses for fewer, and the texts go on.
TEST(RecurrentDraftsMemory, TextsGoOnWithoutADraft) {
  testing::TemporaryDirectory directory;
  testing::WriteQwen2(directory.path(), 40);
  const Device device = *Device::Open("cpu", {.threads = 1});
  const auto open = [&](int64_t bytes) {
    return testing::OpenRecurrent(directory.path(), device, {.batch_invariant = true}, {1}, bytes);
  };
  const Model model = *open(INT64_MAX);
  std::vector<Tokens> prompts;
  for (size_t i = 0; i < 24; ++i) {
    prompts.push_back(testing::TokensBelow(kVocab, 40 + i));
    prompts.back().back() = static_cast<int32_t>(i);
  }
  GenerateOptions options{.max_tokens = 30};
  const auto plain = GenerateBatch(model, prompts, {&options, 1});
  ASSERT_TRUE(plain.ok()) << plain.status().message();
  const CacheShape shape = CacheShape::Of(Internals::Impl(model).decoder.config, DType::kBf16);
  const int64_t page = PageMemory::Make(device, shape)->PageBytes(0);
  // The draft is fed the prompts at once, in three passes: memory runs out in each of them.
  for (const int64_t pages : {2, 14, 40, 70}) {
    options.speculation = {.tokens = 5, .always = true, .source = DraftSource::kModel};
    options.speculation.model = *open(pages * page);
    const auto made = GenerateBatch(model, prompts, {&options, 1}, {.prefill_tokens = 2000});
    ASSERT_TRUE(made.ok()) << made.status().message();
    int64_t drafted = 0;
    for (size_t i = 0; i < prompts.size(); ++i) {
      EXPECT_EQ((*made)[i].token_ids, (*plain)[i].token_ids) << i;
      drafted += (*made)[i].drafts.drafted;
    }
    EXPECT_EQ(drafted > 0, pages == 70) << pages;
  }
}

/// A request starts next to another where it would if that one had no guesses.
TEST(RecurrentDraftsMemory, GuessesGiveWay) {
  testing::TemporaryDirectory directory;
  testing::WriteQwen2(directory.path(), 40);
  const Device device = *Device::Open("cpu", {.threads = 2});
  // Wrong guesses leave the most pages.
  testing::TemporaryDirectory other;
  testing::WriteQwen2(other.path(), 2);
  const Model stranger = *Model::Open(other.path(), device);
  int64_t drafted = 0;
  const auto most_running = [&](int64_t bytes, int64_t drafts) {
    const Model model = *testing::OpenRecurrent(directory.path(), device, {.batch_invariant = true},
                                                {1}, bytes, true);
    SchedulerOptions options;
    if (drafts > 0) {
      options.speculation = {.tokens = drafts, .always = true, .source = DraftSource::kModel};
      options.speculation.model = stranger;
    }
    Scheduler scheduler = *Scheduler::Make(model, options);
    int64_t most = 0;
    std::vector<Event> events;
    for (int step = 0; step < 60; ++step) {
      if (step < 30 && step % 5 == 0) {
        Request request;
        request.prompt = Repetitive();
        request.options = {.max_tokens = 1000, .ignore_eos = true};
        EXPECT_TRUE(scheduler.Submit(request).ok());
      }
      EXPECT_TRUE(scheduler.Step(std::chrono::milliseconds(0), &events).ok());
      for (const Event& event : events) EXPECT_TRUE(event.status.ok()) << event.status.message();
      most = std::max(most, scheduler.statistics().running);
    }
    drafted += scheduler.statistics().draft_tokens;
    return most;
  };
  for (int64_t bytes = 3 << 20; bytes < 7 << 20; bytes += 1 << 19) {
    EXPECT_EQ(most_running(bytes, 3), most_running(bytes, 0)) << bytes;
  }
  EXPECT_GT(drafted, 0);
}

/// A sequence goes on after guesses, with the memory of its states alone.
TEST_P(RecurrentDrafts, LeaveOneState) {
  const GenerateOptions options{.max_tokens = 12, .speculation = testing::SpeculateBy(stranger_)};
  Sequence sequence = *model_->NewSequence();
  Tokens text = Repetitive();
  for (int turn = 0; turn < 3; ++turn) {
    const Generated plain = Must(Generate(*model_, text, {.max_tokens = 12}));
    EXPECT_EQ(Must(Generate(*model_, &sequence, text, options)).token_ids, plain.token_ids);
    EXPECT_EQ(StatesOf(*model_).states_used, 1);
    text.insert(text.end(), plain.token_ids.begin(), plain.token_ids.end());
    text.push_back(turn);
  }
}

struct Said {
  Tokens tokens;
  std::vector<float> logprobs;
  bool operator==(const Said&) const = default;
};

/// Runs requests, of which the second one wants log-probabilities, and returns their texts.
std::vector<Said> RunAll(Scheduler* scheduler, const std::vector<Tokens>& prompts) {
  std::map<int64_t, Said> texts;
  std::vector<Event> events;
  for (const Tokens& prompt : prompts) {
    Request request;
    request.prompt = prompt;
    request.options = {.max_tokens = 30, .ignore_eos = true};
    request.logprobs = &prompt == &prompts[1] ? 1 : -1;
    EXPECT_TRUE(scheduler->Submit(request).ok());
  }
  do {
    EXPECT_TRUE(scheduler->Step(std::chrono::milliseconds(0), &events).ok());
    for (const Event& event : events) {
      EXPECT_TRUE(event.status.ok()) << event.status.message();
      Said& text = texts[event.id];
      text.tokens.insert(text.tokens.end(), event.tokens.begin(), event.tokens.end());
      for (const TokenLogprobs& each : event.logprobs) text.logprobs.push_back(each.token.logprob);
    }
  } while (scheduler->statistics().running + scheduler->statistics().waiting > 0);
  std::vector<Said> said;
  for (const auto& [id, text] : texts) said.push_back(text);
  return said;
}

/// Launches of several steps, and guesses, end where a text publishes its states: the last whole
/// page of the prompt, and the sixteenth page.
TEST_P(RecurrentDrafts, StopWhereStatesArePublished) {
  const auto page = static_cast<size_t>(Internals::Impl(*model_).pool->page_tokens());
  for (const bool drafted : {false, true}) {
    const Model& model = drafted ? *twin_ : *model_;
    SchedulerOptions options;
    if (drafted) options.speculation = testing::SpeculateBy(std::nullopt);
    auto scheduler = Scheduler::Make(model, options);
    ASSERT_TRUE(scheduler.ok()) << scheduler.status().message();
    Request request;
    request.prompt = testing::TokensBelow(kVocab, 16 * page - 20);
    request.options = {.max_tokens = 40, .ignore_eos = true};
    ASSERT_TRUE(scheduler->Submit(request).ok());
    std::vector<Event> events;
    do {
      ASSERT_TRUE(scheduler->Step(std::chrono::seconds(0), &events).ok());
    } while (scheduler->statistics().running > 0);
    EXPECT_EQ(StatesOf(model).states_cached, 2) << drafted;
  }
}

/// Texts that share a prefix, publish states where they would without guesses, and, where the cache
/// has too little memory for all guesses, have fewer.
TEST_P(RecurrentDrafts, ShareTheCacheWithOthers) {
  const auto page = static_cast<size_t>(Internals::Impl(*model_).pool->page_tokens());
  Tokens prompt = testing::TokensBelow(kVocab, 16 * page - 20);
  std::vector<Tokens> prompts = {prompt, prompt, Repetitive()};
  prompts[1].back() = 3;
  auto without = Scheduler::Make(*twin_);
  const std::vector<Said> expected = RunAll(&*without, prompts);
  EXPECT_EQ(expected[1].logprobs.size(), 30U);
  EXPECT_EQ(RunAll(&*without, prompts), expected);
  std::vector<std::optional<Model>> models = {model_};
  if (GetParam() == "fading_sum") {
    const CacheShape shape = CacheShape::Of(Internals::Impl(*model_).decoder.config, DType::kBf16);
    const int64_t bytes = 56 * PageMemory::Make(model_->device(), shape)->PageBytes(0);
    models.emplace_back(Open(directory_.path(), kVocab, bytes));
  }
  for (const auto& model : models) {
    SchedulerOptions options;
    options.speculation = testing::SpeculateBy(std::nullopt);
    auto scheduler = Scheduler::Make(*model, options);
    ASSERT_TRUE(scheduler.ok()) << scheduler.status().message();
    for (int round = 0; round < 2; ++round) {
      EXPECT_EQ(RunAll(&*scheduler, prompts), expected) << round;
    }
    EXPECT_GT(scheduler->statistics().draft_tokens, 0);
    EXPECT_EQ(StatesOf(*model).states_used, 0);
    EXPECT_EQ(StatesOf(*model).pages_used, 0);
    if (&model != &models.front()) continue;
    EXPECT_GT(StatesOf(*model).states_cached, 1);
    EXPECT_EQ(StatesOf(*model).states_cached, StatesOf(*twin_).states_cached);
  }
}

}  // namespace
}  // namespace marlin::recurrent_drafts_test
