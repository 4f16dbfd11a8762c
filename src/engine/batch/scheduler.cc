#include "marlin/scheduler.h"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <new>
#include <unordered_map>

#include "base/macros.h"
#include "engine/batch/continuous_batch.h"
#include "engine/batch/scheduler_checks.h"
#include "engine/generation_checks.h"
#include "engine/kv_cache.h"
#include "engine/model_impl.h"
#include "engine/speculation/speculation.h"
#include "model/placement.h"

namespace marlin {
namespace {

using Clock = BatchText::Clock;

/// Defaults of SchedulerOptions::prefill_tokens. With as many rows a product is bound by arithmetic
/// and no longer by reading the weights: smaller parts would delay the prompt without need, and
/// larger ones the next tokens of the others.
constexpr int64_t kDevicePrefill = 1024;
constexpr int64_t kHostPrefill = 128;

/// wait_for adds the duration to the time, which must not overflow.
constexpr std::chrono::milliseconds kLongestWait = std::chrono::hours(1);

Status OutOfMemory() { return Status(Code::kOutOfMemory, "scheduler: cannot allocate"); }

int64_t PrefillTokens(const Model& model, int64_t wanted) {
  if (wanted > 0) return wanted;
  return ReadsHostMemory(model.device()) ? kHostPrefill : kDevicePrefill;
}

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

/// Requests and cancellations wait for the thread that steps, protected by `mutex_`; the batch and
/// the texts are that thread's.
class Scheduler::Impl final : public BatchObserver {
 public:
  Impl(const Model& model, const SchedulerOptions& options) : model_(model), options_(options) {}

  Status MakeBatch() {
    const BatchLimits limits{.max_running = options_.max_running,
                             .prefill_tokens = PrefillTokens(model_, options_.prefill_tokens),
                             .interactive = true};
    MARLIN_ASSIGN_OR_RETURN(ContinuousBatch batch, ContinuousBatch::Make(model_, limits, *this));
    batch_.emplace(std::move(batch));
    MARLIN_ASSIGN_OR_RETURN(speculation_, Speculation::Make(model_, options_.speculation));
    const PagePool& pool = *Internals::Impl(model_).pool;
    statistics_.page_tokens = pool.page_tokens();
    statistics_.page_groups = pool.TokenGroups();
    statistics_.pages = pool.MostPages();
    return {};
  }

  Result<std::optional<int64_t>> Submit(Request request);
  void Cancel(int64_t id);
  Status SetAllowed(int64_t id, std::vector<uint32_t> allowed);
  void Wake();
  Status Step(std::chrono::milliseconds idle, std::vector<Event>* events);
  SchedulerStatistics statistics() const {
    const std::lock_guard lock(mutex_);
    SchedulerStatistics statistics = statistics_;
    statistics.waiting += std::ssize(arrivals_.texts);
    return statistics;
  }

  bool Sampled(BatchText& text, int32_t token, const TokenLogprobs* logprobs) override;
  void Ended(BatchText& text) override;

 private:
  struct ScheduledText : BatchText {
    int64_t id = 0;
    Request request;
    Clock::time_point submitted;
  };
  struct Arrivals {
    std::vector<std::unique_ptr<ScheduledText>> texts;
    std::vector<int64_t> cancelled;
    std::map<int64_t, std::vector<uint32_t>> allowed;
    bool empty() const { return texts.empty() && cancelled.empty() && allowed.empty(); }
  };

  bool HasRoom() const;
  Status TakeArrivals(std::chrono::milliseconds idle, Arrivals* arrivals);
  Status Run(std::chrono::milliseconds idle);
  void RunPass();
  Event& EventOf(const BatchText& text);
  static void TakePrompt(BatchText& text, Event* event);
  void PublishStatistics();

  const Model model_;
  const SchedulerOptions options_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Arrivals arrivals_;
  bool woken_ = false;
  int64_t next_id_ = 0;
  std::unordered_map<int64_t, bool> constrained_;  ///< Whether a request is that has not ended.
  Status ended_;                                   ///< The error after which nothing runs.
  SchedulerStatistics statistics_;

  std::atomic_flag stepping_;
  std::optional<ContinuousBatch> batch_;
  std::optional<Speculation> speculation_;
  std::unordered_map<int64_t, std::unique_ptr<ScheduledText>> texts_;
  std::map<int64_t, Event> events_;  ///< The pass's, by id.
  std::vector<int64_t> done_;        ///< Texts that ended in the pass.
  int64_t prompt_tokens_ = 0;
  int64_t cached_tokens_ = 0;  ///< Tokens of texts that ended.
  int64_t generated_tokens_ = 0;
};

/// Requests that could run count as running, before they do: a queue of no places still lets as
/// many run as the batch has slots.
bool Scheduler::Impl::HasRoom() const {
  const int64_t held = statistics_.running + statistics_.waiting + std::ssize(arrivals_.texts);
  return held < batch_->max_running() + options_.max_waiting;
}

Result<std::optional<int64_t>> Scheduler::Impl::Submit(Request request) {
  MARLIN_RETURN_IF_ERROR(CheckRequest(model_, request));
  auto text = std::make_unique<ScheduledText>();
  text->request = std::move(request);
  text->prompt = text->request.prompt;
  text->options = &text->request.options;
  text->stops = StopTokens(model_, text->request.options);
  // Tokens that are not fed have no logits.
  const bool shares = options_.prefix_cache && !text->request.prompt_logprobs;
  if (shares) text->salt = text->request.cache_salt;
  text->constrained = text->request.constrained;
  text->logprobs = text->request.logprobs;
  text->prompt_logprobs = text->request.prompt_logprobs;
  text->drafter = speculation_->NewDrafter();
  text->control.emplace(options_.speculation);
  text->submitted = Clock::now();
  int64_t id = 0;
  {
    const std::lock_guard lock(mutex_);
    MARLIN_RETURN_IF_ERROR(ended_);
    if (!HasRoom()) return std::optional<int64_t>();
    id = text->id = next_id_++;
    constrained_[id] = text->constrained;
    arrivals_.texts.push_back(std::move(text));
  }
  changed_.notify_one();
  return std::optional(id);
}

void Scheduler::Impl::Cancel(int64_t id) {
  {
    const std::lock_guard lock(mutex_);
    arrivals_.cancelled.push_back(id);
  }
  changed_.notify_one();
}

Status Scheduler::Impl::SetAllowed(int64_t id, std::vector<uint32_t> allowed) {
  MARLIN_RETURN_IF_ERROR(CheckAllowed(model_, allowed));
  {
    const std::lock_guard lock(mutex_);
    const auto found = constrained_.find(id);
    const bool has_ended = found == constrained_.end() && id >= 0 && id < next_id_;
    if (has_ended) return {};
    if (found == constrained_.end() || !found->second) {
      return Status(Code::kInvalidArgument,
                    fmt::format("id: expected a constrained request's, got {}", id));
    }
    arrivals_.allowed[id] = std::move(allowed);
  }
  changed_.notify_one();
  return {};
}

void Scheduler::Impl::Wake() {
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  changed_.notify_one();
}

Status Scheduler::Impl::Step(std::chrono::milliseconds idle, std::vector<Event>* events) {
  if (stepping_.test_and_set(std::memory_order_acquire)) {
    return Status(Code::kInvalidArgument, "Step: expected one thread at a time, got another");
  }
  Status status;
  try {
    events->clear();
    status = Run(idle);
    for (auto& [id, event] : events_) events->push_back(std::move(event));
  } catch (const std::bad_alloc&) {
    // The books may be incomplete.
    status = OutOfMemory();
    const std::lock_guard lock(mutex_);
    ended_ = status;
  }
  events_.clear();
  stepping_.clear(std::memory_order_release);
  return status;
}

/// Waits for work, and takes it.
Status Scheduler::Impl::TakeArrivals(std::chrono::milliseconds idle, Arrivals* arrivals) {
  std::unique_lock lock(mutex_);
  MARLIN_RETURN_IF_ERROR(ended_);
  if (batch_->idle() || batch_->stalled()) {
    changed_.wait_for(lock, std::min(idle, kLongestWait),
                      [this] { return woken_ || !arrivals_.empty(); });
  }
  woken_ = false;
  *arrivals = std::exchange(arrivals_, {});
  statistics_.waiting += std::ssize(arrivals->texts);
  return {};
}

Status Scheduler::Impl::Run(std::chrono::milliseconds idle) {
  Arrivals arrivals;
  MARLIN_RETURN_IF_ERROR(TakeArrivals(idle, &arrivals));
  for (std::unique_ptr<ScheduledText>& text : arrivals.texts) {
    ScheduledText& added = *text;
    texts_.emplace(added.id, std::move(text));
    prompt_tokens_ += std::ssize(added.prompt);
    batch_->Add(added);
  }
  for (auto& [id, allowed] : arrivals.allowed) {
    const auto found = texts_.find(id);
    if (found != texts_.end()) found->second->allowed = std::move(allowed);
  }
  for (const int64_t id : arrivals.cancelled) {
    const auto found = texts_.find(id);
    if (found != texts_.end() && !found->second->ended) batch_->Cancel(*found->second);
  }
  if (!batch_->idle()) RunPass();
  PublishStatistics();
  for (const int64_t id : done_) texts_.erase(id);
  done_.clear();
  return {};
}

void Scheduler::Impl::RunPass() {
  const Status status = batch_->Step();
  if (status.code() == Code::kDeviceLost) {
    {
      // A request that is submitted from here on is refused; those before are in the arrivals.
      const std::lock_guard lock(mutex_);
      ended_ = status;
      for (std::unique_ptr<ScheduledText>& text : std::exchange(arrivals_.texts, {})) {
        const int64_t id = text->id;
        batch_->Add(*texts_.emplace(id, std::move(text)).first->second);
      }
    }
    batch_->EndAll(status);
  } else if (!status.ok()) {
    batch_->EndRunning(status);
  }
}

Event& Scheduler::Impl::EventOf(const BatchText& text) {
  const auto& scheduled = static_cast<const ScheduledText&>(text);
  Event& event = events_[scheduled.id];
  event.id = scheduled.id;
  event.cached_tokens = text.cached_tokens;
  event.waited_seconds = Seconds(text.start.value_or(Clock::now()) - scheduled.submitted);
  event.prefill_seconds = text.generated.prefill_seconds;
  event.decode_seconds = text.generated.decode_seconds;
  event.drafts = text.generated.drafts;
  return event;
}

bool Scheduler::Impl::Sampled(BatchText& text, int32_t token, const TokenLogprobs* logprobs) {
  Event& event = EventOf(text);
  event.tokens.push_back(token);
  if (logprobs != nullptr) event.logprobs.push_back(*logprobs);
  TakePrompt(text, &event);
  ++generated_tokens_;
  return true;
}

void Scheduler::Impl::Ended(BatchText& text) {
  Event& event = EventOf(text);
  TakePrompt(text, &event);
  event.status = text.error;
  if (text.error.ok()) event.ended = text.generated.stop_reason;
  cached_tokens_ += text.cached_tokens;
  done_.push_back(event.id);
}

/// The first event after the prompt has its log-probabilities.
void Scheduler::Impl::TakePrompt(BatchText& text, Event* event) {
  if (!text.of_prompt.empty()) event->prompt_logprobs = std::exchange(text.of_prompt, {});
}

void Scheduler::Impl::PublishStatistics() {
  const PoolStatistics pool = Internals::Impl(model_).pool->statistics();
  const std::lock_guard lock(mutex_);
  for (const int64_t id : done_) constrained_.erase(id);
  statistics_.running = std::ssize(batch_->running());
  statistics_.waiting = batch_->waiting();
  statistics_.pages_used = pool.pages_used;
  statistics_.pages_cached = pool.pages_cached;
  statistics_.prompt_tokens = prompt_tokens_;
  statistics_.cached_tokens = cached_tokens_;
  statistics_.generated_tokens = generated_tokens_;
  statistics_.draft_tokens = batch_->counts().drafts;
  statistics_.accepted_tokens = batch_->counts().accepted;
  statistics_.put_back = batch_->counts().put_back;
}

Scheduler::Scheduler(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Scheduler::Scheduler(Scheduler&&) noexcept = default;
Scheduler& Scheduler::operator=(Scheduler&&) noexcept = default;
Scheduler::~Scheduler() = default;

Result<Scheduler> Scheduler::Make(const Model& model, const SchedulerOptions& options) {
  MARLIN_RETURN_IF_ERROR(CheckModel("model", model));
  MARLIN_RETURN_IF_ERROR(CheckSchedulerOptions(model, options));
  try {
    auto impl = std::make_unique<Impl>(model, options);
    MARLIN_RETURN_IF_ERROR(impl->MakeBatch());
    return Scheduler(std::move(impl));
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  }
}

Result<std::optional<int64_t>> Scheduler::Submit(Request request) {
  try {
    return impl_->Submit(std::move(request));
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  }
}

void Scheduler::Cancel(int64_t id) { impl_->Cancel(id); }

Status Scheduler::Step(std::chrono::milliseconds idle, std::vector<Event>* events) {
  if (events == nullptr) return Status(Code::kInvalidArgument, "events: expected some, got null");
  return impl_->Step(idle, events);
}

Status Scheduler::SetAllowed(int64_t id, std::vector<uint32_t> allowed) {
  try {
    return impl_->SetAllowed(id, std::move(allowed));
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  }
}

void Scheduler::Wake() { impl_->Wake(); }

SchedulerStatistics Scheduler::statistics() const { return impl_->statistics(); }

}  // namespace marlin
