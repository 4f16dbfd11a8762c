// Serving a model: requests come and go while a batch runs.
//
//   auto scheduler = marlin::Scheduler::Make(model);
//   auto id = scheduler->Submit({.prompt = tokens, .options = {.max_tokens = 64}});  // any thread
//   std::vector<marlin::Event> events;
//   while (serving) {  // one thread
//     auto status = scheduler->Step(std::chrono::seconds(1), &events);
//     for (const marlin::Event& event : events) Deliver(event);
//   }
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "marlin/generate.h"
#include "marlin/model.h"
#include "marlin/speculation.h"
#include "marlin/status.h"

#pragma GCC visibility push(default)
namespace marlin {

/// Options of Scheduler::Make.
struct SchedulerOptions {
  /// Most requests that run at a time; their sampler states are allocated at the start, and if
  /// there is no memory for all, fewer run. 0: 256, or 32 where the KV cache's memory is the
  /// host's. More than 512, or the tokens of the device's longest pass, count as that.
  int64_t max_running = 0;
  /// Most requests that wait when as many as can run do; Submit takes no more.
  int64_t max_waiting = 256;
  /// Most tokens of prompts in a pass in which a request decodes: a long prompt then delays the
  /// others' next tokens by no more than that. 0: 128, or 1024 on devices with memory of their own.
  int64_t prefill_tokens = 0;
  /// Keeps the pages of KV caches, so that a request that begins with the tokens of an earlier
  /// request and its text does not feed them again, up to the last whole page. Without
  /// ModelOptions::batch_invariant its logits may round differently than for a prompt fed at once.
  bool prefix_cache = true;
  /// Guesses tokens of the requests, while that promises more tokens per second of all of them. The
  /// layer that predicts further tokens (MTP) sees of a text what follows the cached pages.
  SpeculationOptions speculation = {};
};

/// A prompt to continue.
struct Request {
  std::vector<int32_t> prompt;
  GenerateOptions options;
  /// Reports the log-probability of every generated token and of this number of most likely tokens,
  /// up to 20; -1: none.
  int64_t logprobs = -1;
  /// Reports the log-probabilities of the prompt's tokens, too; the prompt is then fed as a whole.
  bool prompt_logprobs = false;
  /// Only requests with the same salt share the KV cache of their prompts.
  std::string cache_salt;
  /// Samples each token only after SetAllowed said which tokens it may be. Others do not wait.
  bool constrained = false;
};

/// A token and its log-probability under the model, before penalties and temperature.
struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;
};

/// The log-probabilities at one place of a text.
struct TokenLogprobs {
  TokenLogprob token;             ///< The token at this place.
  std::vector<TokenLogprob> top;  ///< The most likely ones, the likeliest first.
};

/// The news of a request in a pass.
struct Event {
  int64_t id = 0;
  std::vector<int32_t> tokens;  ///< New ones, without a stop token.
  /// Set in the last event, unless status has an error. kCallback: it was cancelled.
  std::optional<StopReason> ended;
  Status status;                        ///< An error, with which the request has ended.
  std::vector<TokenLogprobs> logprobs;  ///< One per token, if the request asks for them.
  /// One per token of the prompt but the first, in the first event after the prompt.
  std::vector<TokenLogprobs> prompt_logprobs;
  int64_t cached_tokens = 0;   ///< Tokens of the prompt that were not fed.
  double waited_seconds = 0;   ///< From Submit to the first pass.
  double prefill_seconds = 0;  ///< From there to the first token.
  double decode_seconds = 0;   ///< From there to the last token so far.
  DraftCounts drafts = {};     ///< So far.

  bool last() const { return ended.has_value() || !status.ok(); }
};

/// The state of a scheduler after its last pass; the counts include all requests so far.
struct SchedulerStatistics {
  int64_t running = 0;
  int64_t waiting = 0;       ///< Also those that were put back.
  int64_t pages_used = 0;    ///< Pages of the model's KV cache that sequences hold.
  int64_t pages_cached = 0;  ///< Pages kept for requests to come.
  int64_t page_tokens = 0;   ///< Tokens of a page.
  int64_t page_groups = 0;   ///< Pages that those tokens take: several with sliding windows.
  int64_t pages = 0;         ///< Pages that fit in all; 0: as many as the host has memory for.
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;  ///< Tokens of prompts that were not fed.
  int64_t generated_tokens = 0;
  int64_t draft_tokens = 0;
  int64_t accepted_tokens = 0;  ///< Draft tokens that are part of a text.
  int64_t put_back = 0;         ///< How often a request gave back its pages because memory ran out.
};

/// Continuous batching of requests, first come first served: a request starts as soon as another
/// has ended, its prompt is fed in parts, in passes with the others' decode steps, and when the KV
/// cache's memory runs out, the one that started last is put back and goes on later. With
/// ModelOptions::batch_invariant each text has the bits that Generate gives for it alone. A long
/// prompt shares a pass with the shorter ones that came after it. All functions but Step may be
/// called by any thread at any time. A moved-from scheduler only destructs. The destructor drops
/// the requests, and no other call may be under way.
class Scheduler {
 public:
  /// The scheduler shares the model. Errors: kInvalidArgument naming the option; kUnsupported;
  /// kOutOfMemory for the sampler state of one request.
  static Result<Scheduler> Make(const Model& model, const SchedulerOptions& options = {});
  Scheduler(Scheduler&&) noexcept;
  Scheduler& operator=(Scheduler&&) noexcept;
  ~Scheduler();

  /// Adds a request, and returns its id: 0, 1, ... Nothing: max_waiting requests wait already, and
  /// a later call may have room. Errors: as Generate; kUnsupported; the error of Step that ended
  /// the scheduler.
  Result<std::optional<int64_t>> Submit(Request request);
  /// Ends a request before the next pass; its last event has the reason kCallback. Nothing happens
  /// if it has ended.
  void Cancel(int64_t id);
  /// Lets a constrained request sample its next token: bit i % 32 of allowed[i / 32] allows token
  /// i, in ceil(vocab_size / 32) words. Each token needs a mask of its own; the next one can be set
  /// once the token's event was returned, and a second mask for a token replaces the first. Nothing
  /// happens if the request has ended. Errors: kInvalidArgument for an id that is not a constrained
  /// request's, another number of words and a mask without a token.
  Status SetAllowed(int64_t id, std::vector<uint32_t> allowed);
  /// Runs one pass, and replaces *events by what happened since the last call, one event per
  /// request. Without work it waits for some, or for Wake, up to `idle` (at most an hour). For one
  /// thread at a time. An error of a request is in its event. An error of a pass, which is no
  /// request's own, ends all that took part in it with that status. After kDeviceLost every request
  /// has ended. Errors: kInvalidArgument for null events or a call from two threads; kDeviceLost
  /// and kOutOfMemory of the host, once their events were returned: every later call returns the
  /// same.
  Status Step(std::chrono::milliseconds idle, std::vector<Event>* events);
  /// Lets Step return although there is no work.
  void Wake();
  SchedulerStatistics statistics() const;

 private:
  class Impl;
  explicit Scheduler(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace marlin
#pragma GCC visibility pop
