// Requests that come and go while a batch runs: each text has the bits that it has alone.
#include "marlin/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../source_directory.h"
#include "../test_device.h"
#include "marlin/checkpoint.h"
#include "marlin/generate.h"
#include "marlin/model.h"
#include "random_model.h"
#include "remote_backend.h"

namespace marlin::scheduler_test {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using Tokens = std::vector<int32_t>;

constexpr milliseconds kNoWait{0};

Request MakeRequest(Tokens prompt, int64_t max_tokens) {
  Request request;
  request.prompt = std::move(prompt);
  request.options.max_tokens = max_tokens;
  request.options.ignore_eos = true;
  return request;
}

int64_t MustSubmit(Scheduler& scheduler, Request request) {
  const auto id = scheduler.Submit(std::move(request));
  EXPECT_TRUE(id.ok()) << id.status().message();
  EXPECT_TRUE(id.ok() && id->has_value());
  return id.ok() ? id->value_or(-1) : -1;
}

/// The sum of a request's events.
struct Text {
  Tokens tokens;
  std::optional<StopReason> ended;
  Status status;
  int ends = 0;
  double waited_seconds = -1;
  int64_t cached_tokens = 0;
  std::vector<TokenLogprobs> logprobs;
  std::vector<TokenLogprobs> prompt_logprobs;

  void Add(const Event& event) {
    EXPECT_EQ(ends, 0) << event.id;
    tokens.insert(tokens.end(), event.tokens.begin(), event.tokens.end());
    ended = event.ended;
    status = event.status;
    ends += event.last() ? 1 : 0;
    waited_seconds = event.waited_seconds;
    cached_tokens = event.cached_tokens;
    logprobs.insert(logprobs.end(), event.logprobs.begin(), event.logprobs.end());
    prompt_logprobs.insert(prompt_logprobs.end(), event.prompt_logprobs.begin(),
                           event.prompt_logprobs.end());
  }
};
using Texts = std::map<int64_t, Text>;

/// One pass, whose events are added to `texts`.
std::vector<Event> StepInto(Scheduler& scheduler, Texts* texts) {
  std::vector<Event> events;
  const Status status = scheduler.Step(kNoWait, &events);
  EXPECT_TRUE(status.ok()) << status.message();
  for (const Event& event : events) (*texts)[event.id].Add(event);
  return events;
}

bool HasWork(const Scheduler& scheduler) {
  const SchedulerStatistics now = scheduler.statistics();
  return now.running + now.waiting > 0;
}

void StepUntilIdle(Scheduler& scheduler, Texts* texts) {
  for (int steps = 0; HasWork(scheduler); ++steps) {
    ASSERT_LT(steps, 100000);
    StepInto(scheduler, texts);
  }
}

class SchedulerTexts : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    path_ = SourceDirectory() + "/" + GetParam();
    if (std::string(GetParam()) == "qwen2") {
      path_ = directory_.path();
      testing::WriteQwen2(path_, 40);
    }
    auto model = Model::Open(path_, *Device::Open(TestDevice()), {.batch_invariant = true});
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = *std::move(model);
  }

  Scheduler Make(const SchedulerOptions& options = {}) const {
    auto scheduler = Scheduler::Make(*model_, options);
    EXPECT_TRUE(scheduler.ok()) << scheduler.status().message();
    return *std::move(scheduler);
  }

  /// A prompt that depends on `seed`.
  Tokens Prompt(size_t tokens, size_t seed = 0) const {
    const auto vocab = static_cast<int32_t>(model_->info().vocab_size);
    const Tokens text = testing::TokensBelow(vocab, tokens + 37 * seed);
    return {text.end() - static_cast<std::ptrdiff_t>(tokens), text.end()};
  }

  /// A request that depends on `seed` in everything.
  Request Varied(size_t seed) const {
    Request request = MakeRequest(Prompt(1 + seed * 13 % 90, seed), 2 + 7 * seed % 19);
    request.options.ignore_eos = seed % 4 != 3;
    request.options.sampling.temperature = seed % 3 == 0 ? 0.0F : 0.8F;
    request.options.sampling.seed = 11 * seed;
    request.options.sampling.repetition_penalty = seed % 2 == 0 ? 1.3F : 1.0F;
    request.options.sampling.frequency_penalty = seed % 5 == 0 ? 0.2F : 0.0F;
    return request;
  }

  void ExpectAlone(const Text& got, const Request& request, const std::string& name) const {
    const auto want = Generate(*model_, request.prompt, request.options);
    ASSERT_TRUE(want.ok()) << want.status().message();
    EXPECT_EQ(got.tokens, want->token_ids) << name;
    EXPECT_EQ(got.ended, want->stop_reason) << name;
    EXPECT_EQ(got.ends, 1) << name;
  }

  std::string path_;
  testing::TemporaryDirectory directory_;
  std::optional<Model> model_;
};

INSTANTIATE_TEST_SUITE_P(Models, SchedulerTexts,
                         ::testing::Values("qwen2", "examples/tiny-qwen3-moe"),
                         [](const auto& name) { return "Model" + std::to_string(name.index); });

// One request is submitted per pass, for as long as there are some.
TEST_P(SchedulerTexts, EachHasTheBitsThatItHasAlone) {
  for (const SchedulerOptions& options :
       {SchedulerOptions{}, SchedulerOptions{.max_running = 1},
        SchedulerOptions{.max_running = 3, .prefill_tokens = 7}}) {
    SCOPED_TRACE(std::to_string(options.max_running) + " at a time");
    Scheduler scheduler = Make(options);
    std::map<int64_t, Request> requests;
    Texts texts;
    for (size_t seed = 0; seed < 14; ++seed) {
      const int64_t id = MustSubmit(scheduler, Varied(seed));
      EXPECT_EQ(id, static_cast<int64_t>(seed));
      requests[id] = Varied(seed);
      StepInto(scheduler, &texts);
    }
    StepUntilIdle(scheduler, &texts);
    int64_t prompts = 0;
    int64_t generated = 0;
    for (const auto& [id, request] : requests) {
      ExpectAlone(texts[id], request, std::to_string(id));
      EXPECT_GE(texts[id].waited_seconds, 0);
      prompts += std::ssize(request.prompt);
      generated += std::ssize(texts[id].tokens);
    }
    EXPECT_EQ(texts.size(), requests.size());
    const SchedulerStatistics end = scheduler.statistics();
    EXPECT_EQ(end.prompt_tokens, prompts);
    EXPECT_EQ(end.generated_tokens, generated);
    EXPECT_EQ(end.pages_used, 0);
  }
}

TEST_P(SchedulerTexts, CancelledOnesEndBeforeTheNextPass) {
  Scheduler scheduler = Make({.max_running = 2});
  Texts texts;
  // More tokens than six steps generate: on a GPU a step is up to 8 tokens.
  const Request request = MakeRequest(Prompt(20), 120);
  for (int i = 0; i < 3; ++i) MustSubmit(scheduler, request);
  for (int i = 0; i < 5; ++i) StepInto(scheduler, &texts);
  EXPECT_EQ(scheduler.statistics().running, 2);
  EXPECT_EQ(scheduler.statistics().waiting, 1);
  const Tokens before = texts[1].tokens;
  EXPECT_FALSE(before.empty());
  scheduler.Cancel(1);    // Runs.
  scheduler.Cancel(2);    // Waits.
  scheduler.Cancel(2);    // Has ended by then.
  scheduler.Cancel(999);  // Is none.
  StepInto(scheduler, &texts);
  for (const int64_t id : {1, 2}) {
    EXPECT_EQ(texts[id].ended, StopReason::kCallback) << id;
    EXPECT_EQ(texts[id].ends, 1) << id;
  }
  EXPECT_EQ(texts[1].tokens, before);
  EXPECT_TRUE(texts[2].tokens.empty());
  EXPECT_EQ(scheduler.statistics().running, 1);
  const int64_t late = MustSubmit(scheduler, request);
  scheduler.Cancel(late);  // Before it is seen.
  StepInto(scheduler, &texts);
  EXPECT_EQ(texts[late].ended, StopReason::kCallback);
  StepUntilIdle(scheduler, &texts);
  ExpectAlone(texts[0], request, "0");
}

TEST_P(SchedulerTexts, AFullQueueTakesNoMore) {
  Scheduler scheduler = Make({.max_running = 2, .max_waiting = 1});
  Texts texts;
  const Request request = MakeRequest(Prompt(4), 3);
  for (int i = 0; i < 3; ++i) MustSubmit(scheduler, request);
  const auto is_full = [&] {
    const auto id = scheduler.Submit(request);
    EXPECT_TRUE(id.ok()) << id.status().message();
    return !id->has_value();
  };
  EXPECT_TRUE(is_full());
  StepInto(scheduler, &texts);
  EXPECT_TRUE(is_full());
  scheduler.Cancel(0);
  StepInto(scheduler, &texts);
  MustSubmit(scheduler, request);
  EXPECT_TRUE(is_full());
  StepUntilIdle(scheduler, &texts);
  EXPECT_EQ(texts.size(), 4U);
  Scheduler none = Make({.max_running = 1, .max_waiting = 0});
  MustSubmit(none, request);
  EXPECT_FALSE((*none.Submit(request)).has_value());
}

TEST_P(SchedulerTexts, WrongRequestsAreRefused) {
  Scheduler scheduler = Make();
  const auto error = [&](const Request& request) {
    const auto id = scheduler.Submit(request);
    EXPECT_FALSE(id.ok());
    return std::string(CodeName(id.status().code())) + ": " + id.status().message();
  };
  EXPECT_EQ(error(MakeRequest({}, 1)), "invalid argument: prompt: no tokens");
  EXPECT_EQ(error(MakeRequest({1, -1}, 1)),
            "invalid argument: prompt: token 1 is -1, expected 0.." +
                std::to_string(model_->info().vocab_size - 1));
  EXPECT_EQ(error(MakeRequest({1}, -1)),
            "invalid argument: max_tokens: expected 0 or more, got -1");
  Request request = MakeRequest({1}, 1);
  request.options.sampling.top_p = 2;
  EXPECT_NE(error(request).find("top_p"), std::string::npos);
  request = MakeRequest({1}, 1);
  request.logprobs = 21;
  EXPECT_EQ(error(request), "invalid argument: logprobs: expected -1..20, got 21");
  const auto refused = [&](const SchedulerOptions& options) {
    return Scheduler::Make(*model_, options).status().message();
  };
  EXPECT_EQ(refused({.max_running = -1}), "max_running: expected 0 or more, got -1");
  EXPECT_EQ(refused({.max_waiting = -1}), "max_waiting: expected 0 or more, got -1");
  EXPECT_EQ(refused({.prefill_tokens = -1}), "prefill_tokens: expected 0 or more, got -1");
  EXPECT_EQ(refused({.speculation = {.tokens = -1}}), "speculation.tokens: expected 0..64, got -1");
  EXPECT_EQ(refused({.speculation = {.tokens = 65}}), "speculation.tokens: expected 0..64, got 65");
  EXPECT_EQ(scheduler.Step(kNoWait, nullptr).code(), Code::kInvalidArgument);
  EXPECT_FALSE(HasWork(scheduler));
  const Model moved = std::move(*model_);
  EXPECT_EQ(refused({}), "model: was moved from");
}

TEST_P(SchedulerTexts, OneOfNoTokensEndsAtOnce) {
  Scheduler scheduler = Make();
  Texts texts;
  const int64_t id = MustSubmit(scheduler, MakeRequest({1, 2}, 0));
  StepInto(scheduler, &texts);
  EXPECT_EQ(texts[id].ended, StopReason::kMaxTokens);
  EXPECT_TRUE(texts[id].tokens.empty());
}

// While one text decodes, the prompts of a pass are bounded, and a short one after long ones is fed
// with them.
TEST_P(SchedulerTexts, LongPromptsDelayNobody) {
  Scheduler scheduler = Make({.prefill_tokens = 16});
  Texts texts;
  const Request chat = MakeRequest(Prompt(3), 60);
  MustSubmit(scheduler, chat);
  StepInto(scheduler, &texts);
  std::vector<Request> requests = {chat};
  for (const size_t tokens : {300U, 200U, 4U}) {
    requests.push_back(MakeRequest(Prompt(tokens, tokens), 5));
    MustSubmit(scheduler, requests.back());
  }
  std::map<int64_t, int> first_pass;
  for (int pass = 1; HasWork(scheduler); ++pass) {
    const std::vector<Event> events = StepInto(scheduler, &texts);
    for (const Event& event : events) first_pass.try_emplace(event.id, pass);
    // The chat gets a token in every pass.
    if (pass <= 30) {
      EXPECT_EQ(events.front().id, 0) << pass;
    }
  }
  EXPECT_LE(first_pass[3], 2);
  // 500 tokens at 16 per pass.
  EXPECT_GE(first_pass[1], 300 / 16);
  EXPECT_GE(std::max(first_pass[1], first_pass[2]), 31);
  EXPECT_LE(std::max(first_pass[1], first_pass[2]), 34);
  for (size_t i = 0; i < requests.size(); ++i) {
    ExpectAlone(texts[static_cast<int64_t>(i)], requests[i], std::to_string(i));
  }
}

// A request does not feed whole pages that an earlier one with the same salt has fed, and has the
// same text.
TEST_P(SchedulerTexts, EqualBeginningsAreFedOnce) {
  Scheduler scheduler = Make({.prefill_tokens = 100});
  const int64_t page = scheduler.statistics().page_tokens;
  const Tokens first = Prompt(static_cast<size_t>(2 * page + 10));
  const auto run = [&](Scheduler& with, const Tokens& prompt, const std::string& salt = "") {
    Request request = MakeRequest(prompt, 4);
    request.cache_salt = salt;
    const int64_t id = MustSubmit(with, request);
    Texts texts;
    StepUntilIdle(with, &texts);
    ExpectAlone(texts[id], request, salt);
    return texts[id];
  };
  EXPECT_EQ(run(scheduler, first).cached_tokens, 0);
  EXPECT_GT(scheduler.statistics().pages_cached, 0);
  const Text again = run(scheduler, first);
  EXPECT_EQ(again.cached_tokens, 2 * page);
  EXPECT_EQ(run(scheduler, first, "other").cached_tokens, 0);
  // The last token of a prompt is always fed.
  EXPECT_EQ(run(scheduler, {first.begin(), first.begin() + 2 * page}).cached_tokens, page);
  // A next turn has the text of the turn before.
  Tokens longer = first;
  longer.insert(longer.end(), again.tokens.begin(), again.tokens.end());
  longer.resize(static_cast<size_t>(3 * page), 7);
  EXPECT_EQ(run(scheduler, longer).cached_tokens, 2 * page);
  Tokens other = first;
  other[static_cast<size_t>(page)] ^= 1;
  EXPECT_EQ(run(scheduler, other).cached_tokens, page);
  EXPECT_EQ(scheduler.statistics().cached_tokens, 6 * page);
  EXPECT_EQ(scheduler.statistics().pages_used, 0);
  Scheduler without = Make({.prefix_cache = false});
  EXPECT_EQ(run(without, first).cached_tokens, 0);
}

/// The log softmax of a row.
std::vector<double> LogSoftmax(std::span<const float> logits) {
  const double most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit) - most);
  std::vector<double> row;
  for (const float logit : logits) row.push_back(static_cast<double>(logit) - most - std::log(sum));
  return row;
}

void ExpectLogprobs(const TokenLogprobs& got, std::span<const float> logits, int32_t token,
                    int64_t likely) {
  const std::vector<double> want = LogSoftmax(logits);
  EXPECT_EQ(got.token.token, token);
  EXPECT_NEAR(got.token.logprob, want[static_cast<size_t>(token)], 1e-4);
  ASSERT_EQ(std::ssize(got.top), likely);
  std::vector<double> sorted = want;
  std::sort(sorted.rbegin(), sorted.rend());
  for (size_t i = 0; i < got.top.size(); ++i) {
    EXPECT_NEAR(got.top[i].logprob, sorted[i], 1e-4);
    EXPECT_NEAR(got.top[i].logprob, want[static_cast<size_t>(got.top[i].token)], 1e-4);
  }
}

// The log-probabilities of tokens and prompts follow from Forward's logits, whatever others ask
// for, and how the prompt is divided.
TEST_P(SchedulerTexts, LogprobsComeFromTheLogits) {
  Scheduler scheduler = Make({.prefill_tokens = 13, .speculation = {.tokens = 4, .always = true}});
  std::map<int64_t, Request> requests;
  for (size_t seed = 0; seed < 6; ++seed) {
    Request request = Varied(seed + 3);
    request.logprobs = static_cast<int64_t>(seed) - 1;
    request.prompt_logprobs = seed % 2 == 0;
    if (seed == 2) request.options.max_tokens = 0;  // Only the prompt.
    requests[MustSubmit(scheduler, request)] = request;
  }
  Texts texts;
  StepUntilIdle(scheduler, &texts);
  const int64_t vocab = model_->info().vocab_size;
  for (const auto& [id, request] : requests) {
    SCOPED_TRACE(id);
    ExpectAlone(texts[id], request, "");
    Tokens all = request.prompt;
    all.insert(all.end(), texts[id].tokens.begin(), texts[id].tokens.end());
    std::vector<float> logits(all.size() * static_cast<size_t>(vocab));
    Sequence sequence = *model_->NewSequence();
    const SequenceInput input{&sequence, all, true};
    ASSERT_TRUE(
        model_->Forward({&input, 1}, {logits.data(), DType::kF32, {std::ssize(all), vocab}}).ok());
    const auto row = [&](size_t i) {
      return std::span(logits).subspan(i * static_cast<size_t>(vocab), static_cast<size_t>(vocab));
    };
    const size_t prompt = request.prompt.size();
    const size_t of_prompt = request.prompt_logprobs ? prompt - 1 : 0;
    ASSERT_EQ(texts[id].prompt_logprobs.size(), of_prompt);
    const int64_t likely = std::max<int64_t>(request.logprobs, 0);
    for (size_t i = 0; i < of_prompt; ++i) {
      ExpectLogprobs(texts[id].prompt_logprobs[i], row(i), all[i + 1], likely);
    }
    const size_t generated = request.logprobs < 0 ? 0 : texts[id].tokens.size();
    ASSERT_EQ(texts[id].logprobs.size(), generated);
    for (size_t i = 0; i < generated; ++i) {
      ExpectLogprobs(texts[id].logprobs[i], row(prompt + i - 1), all[prompt + i], likely);
    }
  }
}

// A constrained request samples one token per mask, and the others do not wait.
TEST_P(SchedulerTexts, ConstrainedOnesSampleWithMasks) {
  Scheduler scheduler = Make();
  const auto words = static_cast<size_t>((model_->info().vocab_size + 31) / 32);
  const std::vector<uint32_t> all(words, ~0U);
  const auto only = [&](size_t token) {
    std::vector<uint32_t> mask(words);
    mask[token / 32] = 1U << (token % 32);
    return mask;
  };
  Request constrained = Varied(7);
  constrained.options.max_tokens = 6;
  constrained.options.ignore_eos = true;
  constrained.constrained = true;
  const int64_t forced = MustSubmit(scheduler, constrained);
  const int64_t free = MustSubmit(scheduler, constrained);
  const Request other = Varied(8);
  const int64_t plain = MustSubmit(scheduler, other);
  Texts texts;
  for (int i = 0; i < 40; ++i) StepInto(scheduler, &texts);
  ExpectAlone(texts[plain], other, "plain");
  EXPECT_EQ(texts.size(), 1U);  // The constrained ones wait for their masks.
  EXPECT_EQ(scheduler.statistics().running, 2);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_TRUE(scheduler.SetAllowed(forced, all).ok());
    EXPECT_TRUE(scheduler.SetAllowed(forced, only(40 + i)).ok());  // Replaces the first.
    if (i % 2 == 0) StepInto(scheduler, &texts);
    EXPECT_TRUE(scheduler.SetAllowed(free, all).ok());
    for (int steps = 0; steps < 2; ++steps) StepInto(scheduler, &texts);
    EXPECT_EQ(texts[forced].tokens.size(), i + 1);
    EXPECT_EQ(texts[free].tokens.size(), i + 1);
  }
  EXPECT_EQ(texts[forced].tokens, (Tokens{40, 41, 42, 43, 44, 45}));
  ExpectAlone(texts[free], constrained, "free");
  EXPECT_FALSE(HasWork(scheduler));

  EXPECT_TRUE(scheduler.SetAllowed(free, all).ok());  // Has ended.
  const auto error = [&](int64_t id, const std::vector<uint32_t>& mask) {
    const Status status = scheduler.SetAllowed(id, mask);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.message();
  };
  const int64_t unmasked = MustSubmit(scheduler, other);
  EXPECT_EQ(error(unmasked, all),
            "id: expected a constrained request's, got " + std::to_string(unmasked));
  EXPECT_EQ(error(99, all), "id: expected a constrained request's, got 99");
  EXPECT_EQ(error(free, {}), "allowed: expected " + std::to_string(words) + " words for " +
                                 std::to_string(model_->info().vocab_size) + " tokens, got 0");
  EXPECT_EQ(error(free, std::vector<uint32_t>(words)), "allowed: expected a token, got none");
}

// Step waits for a mask when every request waits for one.
TEST_P(SchedulerTexts, AMaskEndsTheWait) {
  Scheduler scheduler = Make();
  Request request = MakeRequest(Prompt(3), 1);
  request.constrained = true;
  const int64_t id = MustSubmit(scheduler, request);
  Texts texts;
  for (int i = 0; i < 3; ++i) StepInto(scheduler, &texts);
  EXPECT_TRUE(texts.empty());
  const auto words = static_cast<size_t>((model_->info().vocab_size + 31) / 32);
  std::thread masking(
      [&] { EXPECT_TRUE(scheduler.SetAllowed(id, std::vector<uint32_t>(words, ~0U)).ok()); });
  std::vector<Event> events;
  EXPECT_TRUE(scheduler.Step(hours(1), &events).ok());
  masking.join();
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].tokens.size(), 1U);
}

// Guessed tokens change no text.
TEST_P(SchedulerTexts, DraftsGiveTheSameTexts) {
  Scheduler scheduler = Make({.max_running = 4, .speculation = {.tokens = 6}});
  std::map<int64_t, Request> requests;
  Texts texts;
  for (size_t seed = 0; seed < 8; ++seed) {
    Request request = Varied(seed);
    Tokens& prompt = request.prompt;
    const Tokens once = prompt;
    for (int i = 0; i < 3; ++i) prompt.insert(prompt.end(), once.begin(), once.end());
    request.options.max_tokens = 40;
    request.options.sampling = {.temperature = seed % 2 == 0 ? 0.0F : 0.3F, .seed = seed};
    requests[MustSubmit(scheduler, request)] = request;
    StepInto(scheduler, &texts);
  }
  StepUntilIdle(scheduler, &texts);
  for (const auto& [id, request] : requests) ExpectAlone(texts[id], request, std::to_string(id));
  const SchedulerStatistics end = scheduler.statistics();
  EXPECT_GT(end.accepted_tokens, 0);
  EXPECT_GE(end.draft_tokens, end.accepted_tokens);
  EXPECT_EQ(end.pages_used, 0);
}

TEST_P(SchedulerTexts, StepWaitsForWork) {
  Scheduler scheduler = Make();
  std::vector<Event> events;
  const auto step = [&] {
    const Status status = scheduler.Step(hours(100), &events);
    EXPECT_TRUE(status.ok()) << status.message();
  };
  std::thread waking([&] { scheduler.Wake(); });
  step();
  waking.join();
  EXPECT_TRUE(events.empty());
  std::thread submitting([&] { MustSubmit(scheduler, MakeRequest({1}, 1)); });
  step();
  submitting.join();
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].tokens.size(), 1U);
  EXPECT_EQ(events[0].ended, StopReason::kMaxTokens);
  std::thread cancelling([&] { scheduler.Cancel(7); });
  step();
  cancelling.join();
  EXPECT_TRUE(events.empty());
}

// Threads submit and cancel while another steps.
TEST_P(SchedulerTexts, ManyThreadsSubmitAndCancel) {
  constexpr size_t kThreads = 4;
  constexpr size_t kEach = 12;
  Scheduler scheduler = Make({.max_running = 5});
  std::vector<std::map<int64_t, Request>> kept(kThreads);
  std::vector<std::thread> threads;
  std::atomic<size_t> submitting{kThreads};
  for (size_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (size_t i = 0; i < kEach; ++i) {
        const Request request = Varied(thread * kEach + i);
        const int64_t id = MustSubmit(scheduler, request);
        if (i % 3 == 1) {
          scheduler.Cancel(id);
        } else {
          kept[thread][id] = request;
        }
        EXPECT_GE(scheduler.statistics().waiting, 0);
      }
      --submitting;
      scheduler.Wake();
    });
  }
  Texts texts;
  while (submitting > 0 || HasWork(scheduler)) {
    std::vector<Event> events;
    const Status status = scheduler.Step(hours(1), &events);
    EXPECT_TRUE(status.ok()) << status.message();
    for (const Event& event : events) texts[event.id].Add(event);
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(texts.size(), kThreads * kEach);
  for (const auto& [id, text] : texts) EXPECT_EQ(text.ends, 1) << id;
  for (const auto& of_thread : kept) {
    for (const auto& [id, request] : of_thread) ExpectAlone(texts[id], request, "thread");
  }
  EXPECT_EQ(scheduler.statistics().pages_used, 0);
}

/// A model on a device with `for_cache` bytes for its KV cache.
Model OpenWithCache(const std::string& path, const Device& device, int64_t for_cache) {
  const auto checkpoint = Checkpoint::Open(path);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  int64_t weights = 0;
  for (const TensorInfo& tensor : checkpoint->tensors()) {
    weights += tensor.shape.ElementCount() * 2;
  }
  auto model =
      Model::Open(path, device, {.device_memory = weights + for_cache, .batch_invariant = true});
  EXPECT_TRUE(model.ok()) << model.status().message();
  return *std::move(model);
}

class SchedulerMemory : public ::testing::Test {
 protected:
  SchedulerMemory() : path_(SourceDirectory() + "/examples/tiny-qwen3-moe") {}

  Model Open(const testing::RemoteOptions& options, int64_t pages) {
    testing::RemoteOptions with_memory = options;
    with_memory.free_memory = int64_t{1} << 30;
    device_ = testing::OpenRemote(with_memory);
    const Model roomy = OpenWithCache(path_, *device_, int64_t{1} << 28);
    const int64_t page = 256 * roomy.info().kv_cache_bytes_per_token;
    return OpenWithCache(path_, *device_, pages * page + page / 2);
  }

  std::string path_;
  std::optional<Device> device_;
};

// Requests are submitted, cancelled and put back at random; those that are not cancelled have the
// texts that they have alone.
TEST_F(SchedulerMemory, RandomRequestsArePutBackAndGoOn) {
  const Model model = Open({}, 5);
  const Tokens text = testing::TokensBelow(static_cast<int32_t>(model.info().vocab_size), 2000);
  int64_t put_back = 0;
  int64_t cached = 0;
  for (uint32_t seed = 0; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&random](size_t limit) { return random() % limit; };
    auto scheduler = Scheduler::Make(model, {.max_running = 6, .prefill_tokens = 60});
    ASSERT_TRUE(scheduler.ok()) << scheduler.status().message();
    std::map<int64_t, Request> requests;
    Texts texts;
    for (int i = 0; i < 14; ++i) {
      // Every third request begins as others do.
      const auto begin = text.begin() + (i % 3 == 0 ? 0 : static_cast<std::ptrdiff_t>(below(1000)));
      Request request = MakeRequest({begin, begin + 200 + static_cast<std::ptrdiff_t>(below(150))},
                                    static_cast<int64_t>(5 + below(60)));
      request.options.sampling = {.temperature = below(2) == 0 ? 0.9F : 0.0F, .seed = below(99)};
      requests[MustSubmit(*scheduler, request)] = request;
      for (size_t steps = below(12); steps > 0; --steps) StepInto(*scheduler, &texts);
      if (below(4) == 0) scheduler->Cancel(static_cast<int64_t>(below(requests.size())));
    }
    StepUntilIdle(*scheduler, &texts);
    for (const auto& [id, request] : requests) {
      const auto want = Generate(model, request.prompt, request.options);
      ASSERT_TRUE(want.ok()) << want.status().message();
      ASSERT_EQ(texts[id].ends, 1) << id;
      ASSERT_TRUE(texts[id].ended.has_value()) << texts[id].status.message();
      if (texts[id].ended == StopReason::kCallback) {
        ASSERT_LE(texts[id].tokens.size(), want->token_ids.size());
        EXPECT_TRUE(
            std::equal(texts[id].tokens.begin(), texts[id].tokens.end(), want->token_ids.begin()))
            << id;
      } else {
        EXPECT_EQ(texts[id].tokens, want->token_ids) << id;
      }
    }
    put_back += scheduler->statistics().put_back;
    cached += scheduler->statistics().cached_tokens;
    EXPECT_EQ(scheduler->statistics().pages_used, 0);
  }
  EXPECT_GT(put_back, 0);
  EXPECT_GT(cached, 0);
}

/// A model in which the embedding of token `bad` is NaN.
void WriteModelWithNan(const std::string& path, size_t bad) {
  testing::WriteQwen2(path, 40);
  const std::string file = path + "/model.safetensors";
  std::string bytes = testing::ReadFile(file);
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof(header));
  const auto tensors = nlohmann::json::parse(bytes.substr(8, header));
  const auto first = tensors["model.embed_tokens.weight"]["data_offsets"][0].get<size_t>();
  for (size_t i = 0; i < 64; ++i) {
    const uint16_t nan = 0x7fc0;  // In bf16.
    std::memcpy(bytes.data() + 8 + header + first + (bad * 64 + i) * 2, &nan, sizeof(nan));
  }
  testing::WriteFile(file, bytes);
}

// A logit that is no number ends its own request: in the prompt's pass, or later while decoding.
TEST(SchedulerErrors, NonFiniteLogitsEndTheirRequestAlone) {
  testing::TemporaryDirectory directory;
  const auto seen_at = [&](int32_t bad) {
    WriteModelWithNan(directory.path(), static_cast<size_t>(bad));
    auto model =
        Model::Open(directory.path(), *Device::Open(TestDevice()), {.batch_invariant = true});
    EXPECT_TRUE(model.ok()) << model.status().message();
    return *std::move(model);
  };
  const Tokens prompt = {5, 17, 3};
  const Tokens alone = Generate(seen_at(127), prompt, MakeRequest({}, 12).options)->token_ids;
  // The third token that the text generates is bad: the row fails once it is fed.
  const int32_t bad = alone[2];
  const bool repeats = bad == alone[0] || bad == alone[1] || bad == 9 || bad == 11;
  ASSERT_FALSE(repeats);
  const Model model = seen_at(bad);
  const Request good = MakeRequest({9, 11}, 12);
  const auto want = Generate(model, good.prompt, good.options);
  ASSERT_TRUE(want.ok()) << want.status().message();
  auto scheduler = Scheduler::Make(model);
  ASSERT_TRUE(scheduler.ok()) << scheduler.status().message();
  const int64_t before = MustSubmit(*scheduler, good);
  const int64_t later = MustSubmit(*scheduler, MakeRequest(prompt, 12));
  const int64_t at_once = MustSubmit(*scheduler, MakeRequest({4, bad, 6}, 12));
  const int64_t after = MustSubmit(*scheduler, good);
  Texts texts;
  StepUntilIdle(*scheduler, &texts);
  for (const int64_t id : {before, after}) {
    EXPECT_EQ(texts[id].tokens, want->token_ids) << id;
    EXPECT_EQ(texts[id].ended, StopReason::kMaxTokens) << id;
  }
  EXPECT_EQ(texts[later].tokens, Tokens(alone.begin(), alone.begin() + 3));
  EXPECT_TRUE(texts[at_once].tokens.empty());
  for (const int64_t id : {later, at_once}) {
    EXPECT_EQ(texts[id].ends, 1) << id;
    EXPECT_EQ(texts[id].status.code(), Code::kNonFiniteInput) << texts[id].status.message();
    EXPECT_EQ(texts[id].status.message(), "logits: nan for token 0") << id;
  }
  EXPECT_EQ(scheduler->statistics().pages_used, 0);
}

// A request that alone is too long for the memory fails, and the others do not.
TEST_F(SchedulerMemory, OneThatDoesNotFitAloneFailsAlone) {
  const Model model = Open({}, 2);
  const Tokens text = testing::TokensBelow(static_cast<int32_t>(model.info().vocab_size), 900);
  auto scheduler = Scheduler::Make(model);
  ASSERT_TRUE(scheduler.ok()) << scheduler.status().message();
  const Request small = MakeRequest({text.begin(), text.begin() + 100}, 20);
  const int64_t before = MustSubmit(*scheduler, small);
  const int64_t large = MustSubmit(*scheduler, MakeRequest(text, 20));
  const int64_t after = MustSubmit(*scheduler, small);
  Texts texts;
  StepUntilIdle(*scheduler, &texts);
  EXPECT_EQ(texts[large].status.code(), Code::kOutOfMemory);
  EXPECT_EQ(texts[large].status.message().find("KV cache: "), 0U) << texts[large].status.message();
  EXPECT_EQ(texts[large].ends, 1);
  const auto want = Generate(model, small.prompt, small.options);
  for (const int64_t id : {before, after}) EXPECT_EQ(texts[id].tokens, want->token_ids) << id;
}

TEST_F(SchedulerMemory, ALostDeviceEndsAll) {
  bool lost = false;
  const Model model = Open(
      {.fails = [&] { return lost ? Status(Code::kDeviceLost, "remote: gone") : Status(); }}, 20);
  auto scheduler = Scheduler::Make(model, {.max_running = 2});
  ASSERT_TRUE(scheduler.ok()) << scheduler.status().message();
  Texts texts;
  for (int i = 0; i < 3; ++i) MustSubmit(*scheduler, MakeRequest({1, 2, 3}, 20));
  StepInto(*scheduler, &texts);
  lost = true;
  StepInto(*scheduler, &texts);
  EXPECT_EQ(texts.size(), 3U);
  for (const auto& [id, text] : texts) {
    EXPECT_EQ(text.ends, 1) << id;
    EXPECT_EQ(text.status.code(), Code::kDeviceLost) << id;
    EXPECT_EQ(text.status.message(), "remote: gone") << id;
  }
  EXPECT_FALSE(HasWork(*scheduler));
  std::vector<Event> events;
  EXPECT_EQ(scheduler->Step(kNoWait, &events).code(), Code::kDeviceLost);
  EXPECT_EQ(scheduler->Submit(MakeRequest({1}, 1)).status().code(), Code::kDeviceLost);
}

// Any other error of a pass ends what took part in it; what waits goes on.
TEST_F(SchedulerMemory, AnErrorOfAPassEndsItsRequests) {
  int fails = 0;
  const Model model = Open(
      {.fails = [&] { return fails-- > 0 ? Status(Code::kInternal, "remote: wrong") : Status(); }},
      20);
  auto scheduler = Scheduler::Make(model, {.max_running = 2});
  ASSERT_TRUE(scheduler.ok()) << scheduler.status().message();
  Texts texts;
  const Request request = MakeRequest({1, 2, 3}, 20);
  for (int i = 0; i < 3; ++i) MustSubmit(*scheduler, request);
  StepInto(*scheduler, &texts);
  fails = 1;
  StepInto(*scheduler, &texts);
  for (const int64_t id : {0, 1}) EXPECT_EQ(texts[id].status.code(), Code::kInternal) << id;
  StepUntilIdle(*scheduler, &texts);
  EXPECT_EQ(texts[2].tokens, Generate(model, request.prompt, request.options)->token_ids);
}

}  // namespace
}  // namespace marlin::scheduler_test
