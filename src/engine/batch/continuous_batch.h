// Continuous batching: texts enter as others end, prompts are fed in parts with the texts that
// decode, and the text that started last is put back when the KV cache's memory runs out.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "engine/batch/batch_pass.h"
#include "engine/batch/batch_slots.h"
#include "engine/batch/batch_text.h"
#include "engine/speculation/draft_control.h"
#include "marlin/generate.h"
#include "marlin/model.h"
#include "marlin/status.h"

namespace marlin {

/// The bounds of the passes of a ContinuousBatch.
struct BatchLimits {
  /// As BatchOptions::max_batch.
  int64_t max_running = 0;
  /// Most tokens of prompts in one pass. 0: as many as the device's longest pass has room for.
  int64_t prefill_tokens = 0;
  /// For texts that somebody waits for: prefill_tokens bounds only passes in which a text decodes,
  /// and long prompts leave a part of a pass to those that started later. Otherwise the prompt that
  /// started first takes what it can.
  bool interactive = false;
};

/// Counts since a batch was made.
struct BatchCounts {
  int64_t put_back = 0;
  int64_t drafts = 0;
  int64_t accepted = 0;  ///< Drafts that the model sampled, too.
};

/// The texts that run and those that wait to. For one thread.
class ContinuousBatch {
 public:
  /// `model` and `observer` outlive the batch. Errors: kOutOfMemory for the sampler states of one
  /// text; if the memory has no room for all, fewer texts run.
  static Result<ContinuousBatch> Make(const Model& model, const BatchLimits& limits,
                                      BatchObserver& observer);

  int64_t max_running() const { return slots_.count(); }
  /// The one that started first is first.
  std::span<BatchText* const> running() const { return running_; }
  int64_t waiting() const { return std::ssize(waiting_); }
  bool idle() const { return waiting_.empty() && running_.empty(); }
  /// Whether the last step ran no pass, because every text that could run waits for its mask.
  bool stalled() const { return stalled_; }
  const BatchCounts& counts() const { return counts_; }

  /// Adds a checked text, which starts after those that were added before. One of no tokens ends at
  /// once.
  void Add(BatchText& text);
  /// Runs a pass, unless no text is left or all wait. An error of one text ends it alone. Errors:
  /// of a pass, if it is no text's own: then no text has ended, and EndRunning or EndAll must
  /// follow.
  Status Step();
  /// Ends a text as kCallback.
  void Cancel(BatchText& text);
  /// Ends the texts that run, or all, with an error.
  void EndRunning(const Status& error);
  void EndAll(const Status& error);

 private:
  struct Budget;

  ContinuousBatch(const Model& model, const BatchLimits& limits, BatchObserver& observer,
                  BatchSlots slots);

  Status Plan();
  Status PlanRunning(Budget* budget);
  void StartWaiting(Budget* budget);
  void SpendRest(Budget* budget);
  Budget BudgetOfPass() const;
  void Choose(BatchText& text, const Budget& budget) const;
  bool Start(BatchText& text);
  Status PutBackNewest(const Status& cause);
  void Accept(const SampledText& sampled);
  bool AcceptToken(BatchText& text, int32_t token, const TokenLogprobs* logprobs);
  void End(BatchText& text, StopReason reason, const Status& error = {});

  const Model* model_;
  BatchObserver* observer_;
  int64_t pass_tokens_;
  int64_t prefill_tokens_;
  bool interactive_;
  std::deque<BatchText*> waiting_;
  std::vector<BatchText*> running_;
  BatchSlots slots_;
  bool full_ = false;  ///< Until a text has ended, no other starts.
  bool stalled_ = false;
  BatchCounts counts_;
  DraftCosts costs_;
};

/// The default of BatchLimits::max_running, and the most that it may be, for a model's device.
int64_t MaxRunning(const Model& model, int64_t wanted);

}  // namespace marlin
