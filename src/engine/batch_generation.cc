// Continuous batching: texts enter as others end, prompts are fed in parts with the texts that
// decode, and the text that started last is put back when the KV cache's memory runs out.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/macros.h"
#include "engine/decode_call.h"
#include "engine/generation_checks.h"
#include "engine/kv_cache.h"
#include "engine/model_impl.h"
#include "engine/sampler_slots.h"
#include "marlin/generate.h"
#include "marlin/sampling.h"
#include "model/placement.h"
#include "ops/device/device.h"

namespace marlin {
namespace {

using Clock = std::chrono::steady_clock;

/// Bounds of BatchOptions::max_batch = 0. Memory of the host has no limit that would put texts
/// back.
constexpr int64_t kDeviceBatch = 256;
constexpr int64_t kHostBatch = 32;

std::string NameOf(size_t index) { return fmt::format("prompts[{}]", index); }

/// One prompt and its continuation.
struct Text {
  size_t index = 0;
  std::span<const int32_t> prompt;
  const GenerateOptions* options = nullptr;
  std::span<const int32_t> stops;  ///< Token ids.
  Generated generated;
  bool ended = false;
  std::optional<Clock::time_point> start;  ///< When it ran first.
  /// The sampler state of a text that was put back; empty: not yet sampled from.
  std::vector<uint8_t> sampler;

  // While it runs:
  std::optional<Sequence> sequence;
  std::vector<int32_t> tokens;  ///< The prompt and the generated tokens.
  bool alone = false;           ///< No other has run since it started.
  int64_t slot = -1;            ///< Where its sampler state is; -1: it has none yet.
  int64_t piece = 0;            ///< How many tokens the next pass feeds.

  /// Tokens not fed yet; 1 for a text that decodes.
  int64_t left() const { return static_cast<int64_t>(tokens.size()) - sequence->length(); }
  bool samples() const { return piece == left(); }
  std::span<const int32_t> next() const {
    return std::span(tokens).subspan(static_cast<size_t>(sequence->length()),
                                     static_cast<size_t>(piece));
  }
};

/// The tokens of a call, [slots, steps], of which row i has counts[i].
struct Sampled {
  size_t steps = 1;
  std::vector<int32_t> tokens;
  std::vector<int64_t> counts;

  Sampled() = default;
  Sampled(size_t slots, size_t steps_of_call)
      : steps(steps_of_call), tokens(slots * steps), counts(slots) {}
  bool empty() const {
    return std::all_of(counts.begin(), counts.end(), [](int64_t count) { return count == 0; });
  }
  std::span<const int32_t> Row(size_t i) const {
    return std::span(tokens).subspan(i * steps, static_cast<size_t>(counts[i]));
  }
};

class BatchGeneration {
 public:
  BatchGeneration(const Model& model, const BatchOptions& batch, std::vector<Text> texts)
      : model_(model),
        batch_(batch),
        texts_(std::move(texts)),
        // Within one pass, a call that fails has not advanced any sampler state.
        pass_tokens_(Internals::Impl(model.device()).backend().pass_tokens()),
        prefill_tokens_(batch.prefill_tokens > 0 ? batch.prefill_tokens : pass_tokens_) {}

  Result<std::vector<Generated>> Run() {
    for (Text& text : texts_) {
      if (text.options->max_tokens == 0) {
        End(text, StopReason::kMaxTokens);
      } else {
        waiting_.push_back(&text);
      }
    }
    if (!waiting_.empty()) MARLIN_RETURN_IF_ERROR(MakeSlots());
    while (!waiting_.empty() || !running_.empty()) {
      if (batch_.stop && batch_.stop()) {
        EndAll();
        break;
      }
      MARLIN_RETURN_IF_ERROR(Step());
    }
    std::vector<Generated> results;
    for (Text& text : texts_) results.push_back(std::move(text.generated));
    return results;
  }

 private:
  Status MakeSlots() {
    int64_t most = batch_.max_batch;
    if (most == 0) most = ReadsHostMemory(model_.device()) ? kHostBatch : kDeviceBatch;
    most = std::min({most, pass_tokens_, kPassTokens, static_cast<int64_t>(waiting_.size())});
    MARLIN_ASSIGN_OR_RETURN(SamplerSlots slots,
                            SamplerSlots::Make(model_.device(), model_.info().vocab_size, most));
    samplers_.emplace(std::move(slots));
    return {};
  }

  Status Step() {
    MARLIN_RETURN_IF_ERROR(Plan());
    const std::vector<Text*> entered = AssignSlots();
    Sampled sampled;
    Status status = FillSlots(entered);
    if (status.ok()) {
      sampled = Sampled(slots_.size(), StepsOfCall());
      status = AllDecode() ? Decode(&sampled) : Feed(&sampled);
    }
    if (status.code() == Code::kOutOfMemory && sampled.empty()) {
      // The memory of activations: fewer texts need less.
      for (Text* const text : entered) LeaveSlot(*text);
      return PutBackNewest(status);
    }
    if (!status.ok() && status.code() != Code::kOutOfMemory) return status;
    for (Text* const text : entered) text->sampler.clear();
    for (size_t i = 0; i < slots_.size(); ++i) Accept(*slots_[i], sampled.Row(i));
    std::erase_if(running_, [](const Text* text) { return text->ended; });
    return {};
  }

  /// Decides how many tokens of each text the next pass feeds, takes their pages, and starts texts
  /// while there is room.
  Status Plan() {
    int64_t prefill = prefill_tokens_;
    // Each running text may feed one token; this is the room beyond that.
    int64_t room = pass_tokens_ - static_cast<int64_t>(running_.size());
    const auto choose = [&](Text& text) {
      const int64_t left = text.left();
      text.piece = left == 1 ? 1 : std::min({left, prefill, 1 + room});
    };
    const auto take = [&](const Text& text) {
      if (text.piece == 0) return;
      if (text.left() > 1) prefill -= text.piece;
      room -= text.piece - 1;
    };
    for (size_t i = 0; i < running_.size();) {
      Text& text = *running_[i];
      choose(text);
      const Status reserved = Reserve(text);
      if (reserved.code() == Code::kOutOfMemory) {
        MARLIN_RETURN_IF_ERROR(PutBackNewest(reserved));
        ++room;
        continue;
      }
      MARLIN_RETURN_IF_ERROR(reserved);
      take(text);
      ++i;
    }
    while (!waiting_.empty() && (!full_ || running_.empty()) && room > 0 && prefill > 0 &&
           static_cast<int64_t>(running_.size()) < samplers_->count()) {
      Text& text = *waiting_.front();
      MARLIN_RETURN_IF_ERROR(Start(text));
      --room;
      choose(text);
      const Status reserved = Reserve(text);
      if (reserved.code() == Code::kOutOfMemory && !running_.empty()) {
        text.sequence.reset();
        full_ = true;
        break;
      }
      if (!reserved.ok()) return reserved.WithContext(NameOf(text.index));
      take(text);
      text.alone = running_.empty();
      for (Text* const other : running_) other->alone = false;
      waiting_.pop_front();
      running_.push_back(&text);
    }
    return {};
  }

  Status Start(Text& text) {
    MARLIN_ASSIGN_OR_RETURN(Sequence sequence, model_.NewSequence({.truncatable = false}));
    text.sequence.emplace(std::move(sequence));
    text.tokens.assign(text.prompt.begin(), text.prompt.end());
    text.tokens.insert(text.tokens.end(), text.generated.token_ids.begin(),
                       text.generated.token_ids.end());
    if (!text.start) text.start = Clock::now();
    return {};
  }

  /// Takes the pages of a text's next piece, so that the memory runs out before a pass and not in
  /// it.
  Status Reserve(Text& text) {
    KvCache& cache = text.sequence->state()->cache;
    return cache.Reserve(cache.length(), cache.length() + text.piece);
  }

  /// Frees the pages of the text that started last, which starts again when another has ended.
  /// Errors: `cause`, if that text was alone all the time.
  Status PutBackNewest(const Status& cause) {
    Text& text = *running_.back();
    if (text.alone) return cause.WithContext(NameOf(text.index));
    if (text.slot >= 0) {
      MARLIN_ASSIGN_OR_RETURN(text.sampler, samplers_->Save(text.slot));
      LeaveSlot(text);
    }
    text.sequence.reset();
    running_.pop_back();
    waiting_.push_front(&text);
    full_ = true;
    return {};
  }

  void LeaveSlot(Text& text) {
    if (text.slot >= 0) slots_[static_cast<size_t>(text.slot)] = nullptr;
    text.slot = -1;
  }

  /// Gives slots to the texts that sample for the first time since they started; returns those.
  std::vector<Text*> AssignSlots() {
    std::vector<Text*> entered;
    for (Text* const text : running_) {
      if (!text->samples() || text->slot >= 0) continue;
      const auto hole = std::find(slots_.begin(), slots_.end(), nullptr);
      text->slot = hole - slots_.begin();
      if (hole == slots_.end()) {
        slots_.push_back(text);
      } else {
        *hole = text;
      }
      entered.push_back(text);
    }
    return entered;
  }

  /// Writes the sampler states of texts that got slots, and closes the gaps of those that ended.
  Status FillSlots(std::span<Text* const> entered) {
    std::vector<SamplerSlots::Reset> resets;
    for (Text* const text : entered) {
      if (text->sampler.empty()) {
        resets.push_back({text->slot, &text->options->sampling, text->prompt});
      } else {
        MARLIN_RETURN_IF_ERROR(samplers_->Restore(text->slot, text->sampler));
      }
    }
    MARLIN_RETURN_IF_ERROR(samplers_->ResetAll(resets));
    for (size_t i = 0; i < slots_.size(); ++i) {
      while (!slots_.empty() && slots_.back() == nullptr) slots_.pop_back();
      if (i >= slots_.size() || slots_[i] != nullptr) continue;
      Text& last = *slots_.back();
      MARLIN_RETURN_IF_ERROR(samplers_->Move(last.slot, static_cast<int64_t>(i)));
      last.slot = static_cast<int64_t>(i);
      slots_[i] = &last;
      slots_.pop_back();
    }
    return {};
  }

  bool AllDecode() const {
    return std::all_of(running_.begin(), running_.end(),
                       [](const Text* text) { return text->left() == 1; });
  }

  /// Steps of the next call: where the device takes one after another, a text that ends within
  /// several would waste the others.
  size_t StepsOfCall() const {
    if (!AllDecode() || !Internals::Impl(model_.device()).backend().records()) return 1;
    int64_t most = 1;
    for (const Text* const text : slots_) {
      most = std::max(most, text->options->max_tokens - std::ssize(text->generated.token_ids));
    }
    return static_cast<size_t>(std::min(most, kMostDecodeSteps));
  }

  /// Samples the next tokens of texts that all decode. A stop token of another text ends a row, but
  /// not its text.
  Status Decode(Sampled* sampled) {
    std::vector<DecodeInput> inputs;
    std::vector<int32_t> stops;
    for (Text* const text : slots_) {
      inputs.push_back({&*text->sequence, text->tokens.back()});
      stops.insert(stops.end(), text->stops.begin(), text->stops.end());
    }
    std::sort(stops.begin(), stops.end());
    stops.erase(std::unique(stops.begin(), stops.end()), stops.end());
    const DecodeOptions options{static_cast<int64_t>(sampled->steps), stops};
    return model_.Decode(inputs, samplers_->First(std::ssize(inputs)), options, sampled->tokens,
                         sampled->counts);
  }

  /// Feeds parts of prompts, and samples one token of each text that has no more of them.
  Status Feed(Sampled* sampled) {
    std::vector<SequenceInput> inputs;
    for (Text* const text : slots_) inputs.push_back({&*text->sequence, text->next()});
    const MutableTensorView states = samplers_->First(std::ssize(inputs));
    for (Text* const text : running_) {
      if (text->piece == 0 || text->slot >= 0) continue;
      inputs.push_back({.sequence = &*text->sequence, .tokens = text->next(), .feed_only = true});
    }
    MARLIN_RETURN_IF_ERROR(model_.ForwardAndSample(inputs, states, sampled->tokens));
    sampled->counts.assign(slots_.size(), 1);
    return {};
  }

  /// Adds the tokens sampled for a text.
  void Accept(Text& text, std::span<const int32_t> tokens) {
    Generated& generated = text.generated;
    const double seconds = std::chrono::duration<double>(Clock::now() - *text.start).count();
    if (generated.prefill_seconds == 0) generated.prefill_seconds = seconds;
    for (const int32_t token : tokens) {
      if (std::find(text.stops.begin(), text.stops.end(), token) != text.stops.end()) {
        return End(text, StopReason::kStopToken);
      }
      generated.token_ids.push_back(token);
      text.tokens.push_back(token);
      generated.decode_seconds = seconds - generated.prefill_seconds;
      if (batch_.token && !batch_.token(text.index, token)) {
        return End(text, StopReason::kCallback);
      }
      if (std::ssize(generated.token_ids) == text.options->max_tokens) {
        return End(text, StopReason::kMaxTokens);
      }
      // The last token that was sampled is not fed yet.
      if (std::ssize(text.tokens) > model_.info().max_positions) {
        return End(text, StopReason::kContextFull);
      }
    }
  }

  void End(Text& text, StopReason reason) {
    text.generated.stop_reason = reason;
    text.ended = true;
    LeaveSlot(text);
    text.sequence.reset();
    full_ = false;
    if (batch_.ended) batch_.ended(text.index, text.generated);
  }

  void EndAll() {
    for (Text& text : texts_) {
      if (!text.ended) End(text, StopReason::kCallback);
    }
  }

  const Model& model_;
  const BatchOptions& batch_;
  std::vector<Text> texts_;
  int64_t pass_tokens_;
  int64_t prefill_tokens_;
  std::deque<Text*> waiting_;
  std::vector<Text*> running_;  ///< The one that started first is first.
  std::vector<Text*> slots_;    ///< The text of each slot, null once it has ended.
  std::optional<SamplerSlots> samplers_;
  bool full_ = false;  ///< Until a text has ended, no other starts.
};

Status CheckBatch(std::span<const std::vector<int32_t>> prompts,
                  std::span<const GenerateOptions> options, const BatchOptions& batch) {
  const auto invalid = [](const std::string& message) {
    return Status(Code::kInvalidArgument, message);
  };
  if (options.size() > 1 && options.size() != prompts.size()) {
    return invalid(
        fmt::format("options: expected 1 or {} (prompts), got {}", prompts.size(), options.size()));
  }
  for (size_t i = 0; i < options.size(); ++i) {
    const Status status = CheckGenerateOptions(options[i]);
    if (status.ok()) continue;
    return options.size() == 1 ? status : status.WithContext(fmt::format("options[{}]", i));
  }
  if (batch.max_batch < 0) {
    return invalid(fmt::format("max_batch: expected 0 or more, got {}", batch.max_batch));
  }
  if (batch.prefill_tokens >= 0) return {};
  return invalid(fmt::format("prefill_tokens: expected 0 or more, got {}", batch.prefill_tokens));
}

Result<std::vector<Generated>> Continue(const Model& model,
                                        std::span<const std::vector<int32_t>> prompts,
                                        std::span<const GenerateOptions> options,
                                        const BatchOptions& batch) {
  MARLIN_RETURN_IF_ERROR(CheckModel("model", model));
  MARLIN_RETURN_IF_ERROR(CheckBatch(prompts, options, batch));
  const GenerateOptions usual;
  std::vector<Text> texts(prompts.size());
  for (size_t i = 0; i < prompts.size(); ++i) {
    MARLIN_RETURN_IF_ERROR(CheckPrompt(NameOf(i), model, prompts[i]));
    texts[i].index = i;
    texts[i].prompt = prompts[i];
    texts[i].options = options.empty() ? &usual : &options[options.size() == 1 ? 0 : i];
    texts[i].stops = StopTokens(model, *texts[i].options);
  }
  return BatchGeneration(model, batch, std::move(texts)).Run();
}

}  // namespace

Result<std::vector<Generated>> GenerateBatch(const Model& model,
                                             std::span<const std::vector<int32_t>> prompts,
                                             std::span<const GenerateOptions> options,
                                             const BatchOptions& batch) {
  try {
    return Continue(model, prompts, options, batch);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "generate: cannot allocate");
  }
}

}  // namespace marlin
