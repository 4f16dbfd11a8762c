#include "engine/forward_call.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <mutex>
#include <optional>
#include <vector>

#include "base/checked.h"
#include "base/macros.h"
#include "engine/forward.h"
#include "engine/hidden_rows.h"
#include "engine/host_pass.h"
#include "engine/kv_cache.h"
#include "engine/model_impl.h"
#include "engine/pass_upload.h"
#include "model/placement.h"
#include "ops/decoder/sampling.h"
#include "plan/step/sample_marks.h"

namespace marlin {
namespace {

/// The tokens of a Forward call that share one pass.
struct PassPlan {
  std::vector<PassChunk> chunks;
  int64_t tokens = 0;
  int64_t wanted = 0;  ///< Rows of logits.
};

/// Passes of at most `most` tokens.
std::vector<PassPlan> PlanPasses(std::span<const SequenceInput> inputs, int64_t most) {
  std::vector<PassPlan> passes(1);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const bool all_logits = inputs[i].all_logits;
    const int64_t last_logits = all_logits ? 0 : WantedRows(inputs[i]);
    const auto total = static_cast<int64_t>(inputs[i].tokens.size());
    // A token and its drafts are in one pass: each decides whether the next one is sampled.
    const int64_t together = inputs[i].drafts > 0 ? total : 1;
    for (int64_t first = 0; first < total;) {
      if (passes.back().tokens + together > most || passes.back().wanted + together > kPassTokens) {
        passes.emplace_back();
      }
      PassPlan& pass = passes.back();
      int64_t count = std::min(total - first, most - pass.tokens);
      if (all_logits) count = std::min(count, kPassTokens - pass.wanted);
      pass.chunks.push_back({i, first, count});
      pass.tokens += count;
      first += count;
      pass.wanted += all_logits ? count : first == total ? last_logits : 0;
    }
  }
  return passes;
}

/// Whether kernels can write to a matrix in place: contiguous columns, rows that do not overlap.
bool HasRows(const MutableTensorView& view) {
  const bool columns = view.dim(1) <= 1 || view.stride(1) == 1;
  return columns && (view.dim(0) <= 1 || view.stride(0) >= view.dim(1));
}

/// Copies contiguous f32 rows to the rows of a matrix of any strides, from `first` on.
void CopyRows(const MutableTensorView& from, const MutableTensorView& to, int64_t first) {
  for (int64_t row = 0; row < from.dim(0); ++row) {
    const float* const source = from.As<float>() + row * from.dim(1);
    float* const target = to.As<float>() + (first + row) * to.stride(0);
    for (int64_t i = 0; i < from.dim(1); ++i) target[i * to.stride(1)] = source[i];
  }
}

/// The tokens that several steps have fed to an input. The recurrent state of a row that could not
/// be sampled is one token ahead: the sequence stays, and the caller feeds it again.
int64_t FedInSteps(const Model::Impl& model, const StepsWanted& steps, size_t input) {
  const int64_t count = steps.counts[input];
  if (count == steps.steps || !model.pool->HasStates()) return count;
  const auto first = static_cast<size_t>(steps.steps) * input;
  return steps.tokens[first + static_cast<size_t>(count)] == kNoToken ? count : 0;
}

/// Gives up the recurrent states that a call without success has computed.
void GiveUpStates(std::span<const SequenceInput> inputs) {
  for (const SequenceInput& input : inputs) {
    KvCache& cache = input.sequence->state()->cache;
    cache.Grow(cache.length());
  }
}

/// Whether a pass can run again after it has failed. One that goes on from recurrent states of its
/// call may have changed some of them.
bool CanRepeat(const Model::Impl& model, const PassPlan& plan) {
  const auto begins = [](const PassChunk& chunk) { return chunk.first == 0; };
  return !model.pool->HasStates() || std::all_of(plan.chunks.begin(), plan.chunks.end(), begins);
}

/// Lets a step read what the previous one has left: recurrent states, and a draft's hidden states.
void PrepareNextStep(Pass* pass) {
  for (StepPages& pages : pass->values.pages) {
    if (!pages.continued.empty()) pages.block_tables = pages.continued;
  }
  if (pass->decoder.joins()) pass->previous = pass->values.hidden_out;
}

/// One Forward call: passes over its tokens, in sequence.
class ForwardCall {
 public:
  ForwardCall(const Model::Impl& model, std::span<const SequenceInput> inputs, Arena& arena,
              Arena* host_arena, const Wanted& wanted)
      : model_(model), inputs_(inputs), arena_(arena), host_arena_(host_arena), wanted_(wanted) {
    for (const SequenceInput& input : inputs) {
      has_targets_ |= input.all_logits && wanted.samples();
      has_drafts_ |= input.drafts > 0;
    }
  }

  Status Run() {
    const Status status = RunPasses();
    // Even after an error, no work may still write logits or read activations.
    const Status finished = model_.device.Synchronize();
    if (!status.ok() || !finished.ok()) GiveUpStates(inputs_);
    MARLIN_RETURN_IF_ERROR(status);
    MARLIN_RETURN_IF_ERROR(finished);
    Grow();
    return {};
  }

 private:
  /// Lets the sequences have what they were fed, of drafts those that were sampled, too, and
  /// nothing where the logits could not be sampled.
  void Grow() const {
    auto tokens = wanted_.tokens;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const SequenceInput& input = inputs_[i];
      KvCache& cache = input.sequence->state()->cache;
      auto fed = static_cast<int64_t>(input.tokens.size());
      if (wanted_.steps != nullptr) {
        fed = FedInSteps(model_, *wanted_.steps, i);
      } else if (!wanted_.samplers.empty() && !input.feed_only) {
        const auto of_input = tokens.first(static_cast<size_t>(SampledTokens(input)));
        const int64_t sampled = CountSampled(of_input);
        if (input.drafts > 0 || sampled == 0) fed = sampled;
        tokens = tokens.subspan(of_input.size());
      }
      cache.Grow(cache.length() + fed);
    }
  }

  Status RunPasses() {
    const int64_t most = Internals::Impl(model_.device).backend().pass_tokens();
    for (const PassPlan& plan : PlanPasses(inputs_, most)) {
      const int64_t first_row = next_row_;
      Status status = RunPass(plan);
      if (status.code() == Code::kOutOfMemory && CanRepeat(model_, plan)) {
        // Cached pages make room for activations. No work may run when the pass is repeated.
        MARLIN_RETURN_IF_ERROR(model_.device.Synchronize());
        next_row_ = first_row;
        if (model_.pool->DropCached()) status = RunPass(plan);
      }
      MARLIN_RETURN_IF_ERROR(status);
    }
    return {};
  }

  Status RunPass(const PassPlan& plan) {
    const ArenaScope scope(arena_);
    Pass pass{model_.device,   model_.decoder, *model_.pool,
              model_.products, arena_,         wanted_.routing};
    PassRows rows;
    for (const PassChunk& chunk : plan.chunks) {
      MARLIN_RETURN_IF_ERROR(AddChunk(chunk, &rows));
    }
    state_rows_ = rows.state_rows;
    std::optional<HostPass> host;
    if (host_arena_ != nullptr) {
      MARLIN_RETURN_IF_ERROR(host.emplace(model_, *host_arena_, wanted_).Run(rows));
    }
    PassUpload upload(model_, wanted_, rows);
    MARLIN_RETURN_IF_ERROR(upload.Send(arena_, &pass.values));
    MARLIN_RETURN_IF_ERROR(TakeValues(&pass));
    MARLIN_RETURN_IF_ERROR(TakeResults(&pass.values));
    MARLIN_RETURN_IF_ERROR(GiveHidden(inputs_, plan.chunks, &pass));
    if (host) MARLIN_RETURN_IF_ERROR(host->Give(&pass));
    MARLIN_RETURN_IF_ERROR(RunProgram(pass));
    MARLIN_RETURN_IF_ERROR(FetchHidden(inputs_, plan.chunks, &pass));
    return FetchResults(pass.values, upload);
  }

  Status RunProgram(Pass& pass) {
    if (wanted_.timer != nullptr) {
      if (pass.timer == nullptr) MARLIN_RETURN_IF_ERROR(wanted_.timer->BeginPass());
      pass.timer = wanted_.timer;
      const Status run = model_.program.Run(pass);
      const Status ended = pass.timer->EndPass();
      return run.ok() ? ended : run;
    }
    // Where the host reads selections layer by layer, nothing can be recorded.
    if (pass.routing != nullptr || model_.decoder.host_experts > 0) {
      return model_.program.Run(pass);
    }
    return arena_.recorded().Run(model_.device, pass.values,
                                 [&](void* stream, std::vector<ExpertsPlan>* plans) {
                                   Pass on_stream = pass;
                                   on_stream.products.stream = stream;
                                   on_stream.plans = plans;
                                   return RunSteps(on_stream);
                                 });
  }

  /// The consecutive steps of a pass: each feeds the next one's tokens on the device.
  Status RunSteps(Pass& pass) const {
    const StepValues& values = pass.values;
    if (wanted_.steps == nullptr) return model_.program.Run(pass);
    for (int64_t step = 0; step < values.advance.steps(); ++step) {
      MARLIN_RETURN_IF_ERROR(model_.program.Run(pass));
      MARLIN_RETURN_IF_ERROR(
          AdvanceTokens(model_.device, values.tokens, values.advance, pass.stream()));
      PrepareNextStep(&pass);
    }
    return {};
  }

  /// Whether rows have samplers other than the one of the same number.
  bool maps_samplers() const {
    return !wanted_.sampler_rows.empty() || has_targets_ || has_drafts_;
  }

  Status AddChunk(const PassChunk& chunk, PassRows* rows) {
    const SequenceInput& input = inputs_[chunk.input];
    KvCache& cache = input.sequence->state()->cache;
    const int64_t position = cache.length() + chunk.first;
    MARLIN_RETURN_IF_ERROR(cache.Reserve(position, position + chunk.count, input.drafts));
    rows->caches.push_back(&cache);
    rows->sequences.push_back({chunk.count, position + chunk.count, input.drafts});
    const auto total = static_cast<int64_t>(input.tokens.size());
    for (int64_t i = 0; i < chunk.count; ++i) {
      const int64_t token = chunk.first + i;
      if (token >= total - WantedRows(input)) {
        rows->wanted.push_back(static_cast<int32_t>(rows->ids.size()));
        if (wanted_.samples()) AddWanted(input, token, rows);
      }
      rows->ids.push_back(input.tokens[static_cast<size_t>(token)]);
      rows->positions.push_back(static_cast<int32_t>(position + i));
    }
    rows->first_rows.push_back(static_cast<int32_t>(rows->ids.size()));
    return {};
  }

  /// Adds what sampling needs to know of a wanted row.
  void AddWanted(const SequenceInput& input, int64_t token, PassRows* rows) {
    const auto total = static_cast<int64_t>(input.tokens.size());
    const bool samples = !input.feed_only && token >= total - SampledTokens(input);
    const bool last = token + 1 == total;
    const int32_t next = last ? input.next_token : input.tokens[static_cast<size_t>(token) + 1];
    if (maps_samplers()) {
      const std::span<const int32_t> of_inputs = wanted_.sampler_rows;
      const int32_t state =
          of_inputs.empty() ? static_cast<int32_t>(sampled_inputs_) : of_inputs[sampled_inputs_];
      rows->state_rows.push_back(samples ? state : -1);
    }
    if (has_targets_) rows->targets.push_back(samples ? kNoToken : next);
    if (has_drafts_) rows->drafts.push_back(samples && !last ? next : -1);
    if (wanted_.extras != nullptr && !wanted_.extras->allowed.empty()) {
      std::span<const uint32_t> mask;
      if (samples) mask = wanted_.extras->allowed[sampled_rows_];
      const auto before = static_cast<int64_t>(rows->masks.size());
      rows->masks.insert(rows->masks.end(), mask.begin(), mask.end());
      rows->mask_rows.push_back(mask.empty() ? -1
                                             : static_cast<int32_t>(before / std::ssize(mask)));
    }
    if (samples) ++sampled_rows_;
    if (samples && last) ++sampled_inputs_;
  }

  /// Rows [next_row_, next_row_ + rows) of a matrix.
  MutableTensorView NextRows(const MutableTensorView& matrix, int64_t rows) const {
    auto* const first =
        matrix.As<uint8_t>() + next_row_ * matrix.stride(0) * DTypeBytes(matrix.dtype());
    return {first, matrix.dtype(), {rows, matrix.dim(1)}, {matrix.stride(0), 1}};
  }

  /// Allocates the results of a pass.
  Status TakeResults(StepValues* values) {
    const int64_t rows = values->wanted.dim(0);
    if (rows == 0) return {};
    // A device with memory of its own would copy the caller's, and could not record the pass.
    in_place_ =
        !wanted_.samples() && ComputesInHostMemory(model_.device) && HasRows(wanted_.logits);
    if (in_place_) {
      values->logits = NextRows(wanted_.logits, rows);
      return {};
    }
    const Shape shape{rows, model_.info.vocab_size};
    MARLIN_ASSIGN_OR_RETURN(values->logits, arena_.Take(DType::kF32, shape));
    if (!wanted_.samples()) return {};
    values->samplers = maps_samplers() ? wanted_.samplers : NextRows(wanted_.samplers, rows);
    if (!has_targets_) {
      MARLIN_ASSIGN_OR_RETURN(values->tokens, arena_.Take(DType::kI32, {rows}));
    }
    return wanted_.wants_logprobs() ? TakeLogprobs(values) : Status();
  }

  /// Log-probabilities are adjacent, for one copy: LogProbabilityRows, one after another.
  Status TakeLogprobs(StepValues* values) {
    const int64_t rows = values->wanted.dim(0);
    const int64_t likely = wanted_.extras->likely;
    MARLIN_ASSIGN_OR_RETURN(logprobs_, arena_.Take(DType::kI32, {rows * (1 + 2 * likely)}));
    auto* const first = logprobs_.As<int32_t>();
    values->logprobs = {{first, DType::kF32, {rows}},
                        {first + rows, DType::kI32, {rows, likely}},
                        {first + rows * (1 + likely), DType::kF32, {rows, likely}}};
    return {};
  }

  /// Copies the results of a pass to the caller's memory.
  Status FetchResults(const StepValues& values, const PassUpload& upload) {
    const int64_t rows = values.wanted.dim(0);
    const int64_t first = next_row_;
    next_row_ += rows;
    if (rows == 0 || in_place_) return {};
    MARLIN_RETURN_IF_ERROR(model_.device.Synchronize());
    if (wanted_.steps != nullptr) return FetchSteps(values, upload);
    if (wanted_.samples()) {
      MARLIN_RETURN_IF_ERROR(FetchTokens(values));
      return wanted_.wants_logprobs() ? FetchLogprobs(first, rows) : Status();
    }
    if (model_.writes_host) {
      CopyRows(values.logits, wanted_.logits, first);
      return {};
    }
    std::vector<float> host(static_cast<size_t>(values.logits.ElementCount()));
    MARLIN_RETURN_IF_ERROR(arena_.Download(values.logits, host.data()));
    CopyRows({host.data(), DType::kF32, values.logits.shape()}, wanted_.logits, first);
    return {};
  }

  /// The tokens of the rows that were sampled.
  Status FetchTokens(const StepValues& values) {
    std::vector<int32_t> tokens(static_cast<size_t>(values.tokens.dim(0)));
    MARLIN_RETURN_IF_ERROR(arena_.Download(values.tokens, tokens.data()));
    for (size_t row = 0; row < tokens.size(); ++row) {
      if (!state_rows_.empty() && state_rows_[row] < 0) continue;
      wanted_.tokens[next_token_++] = tokens[row];
    }
    return {};
  }

  Status FetchLogprobs(int64_t first, int64_t rows) const {
    const SampleExtras& extras = *wanted_.extras;
    const auto copy = [&](const float* from, std::span<float> to, int64_t each) {
      std::copy_n(from, rows * each, to.begin() + first * each);
    };
    std::vector<int32_t> host(static_cast<size_t>(logprobs_.ElementCount()));
    MARLIN_RETURN_IF_ERROR(arena_.Download(logprobs_, host.data()));
    std::vector<float> floats(host.size());
    std::memcpy(floats.data(), host.data(), std::span(host).size_bytes());
    copy(floats.data(), extras.of_tokens, 1);
    std::copy_n(host.data() + rows, rows * extras.likely,
                extras.likely_tokens.begin() + first * extras.likely);
    copy(floats.data() + rows * (1 + extras.likely), extras.of_likely, extras.likely);
    return {};
  }

  Status FetchSteps(const StepValues& values, const PassUpload& upload) const {
    const StepsWanted& steps = *wanted_.steps;
    std::vector<int32_t> host(static_cast<size_t>(upload.step_results().ElementCount()));
    MARLIN_RETURN_IF_ERROR(arena_.Download(upload.step_results(), host.data()));
    const auto tokens = host.begin() + static_cast<std::ptrdiff_t>(steps.counts.size());
    std::copy(host.begin(), tokens, steps.counts.begin());
    std::copy(tokens, host.end(), steps.tokens.begin());
    return FetchMarks(values.advance.state_rows);
  }

  /// Puts the mark of each row that could not be sampled after its tokens.
  Status FetchMarks(const TensorView& state_rows) const {
    const StepsWanted& steps = *wanted_.steps;
    const auto is_short = [&](int32_t count) { return count < steps.steps; };
    if (std::none_of(steps.counts.begin(), steps.counts.end(), is_short)) return {};
    std::vector<int32_t> marks(steps.counts.size());
    MARLIN_RETURN_IF_ERROR(arena_.Download(state_rows, marks.data()));
    for (size_t i = 0; i < marks.size(); ++i) {
      if (!is_short(steps.counts[i])) continue;
      const size_t next = i * static_cast<size_t>(steps.steps);
      steps.tokens[next + static_cast<size_t>(steps.counts[i])] = marks[i];
    }
    return {};
  }

  const Model::Impl& model_;
  std::span<const SequenceInput> inputs_;
  Arena& arena_;
  Arena* const host_arena_;  ///< Memory of Model::Impl::host, or null.
  const Wanted& wanted_;
  bool has_targets_ = false;  ///< Some wanted rows only give log-probabilities.
  bool has_drafts_ = false;
  int64_t next_row_ = 0;             ///< Index among the wanted rows of the call.
  size_t next_token_ = 0;            ///< Index among Wanted::tokens.
  size_t sampled_inputs_ = 0;        ///< Whose last rows have been added.
  size_t sampled_rows_ = 0;          ///< Rows that are sampled and have been added.
  std::vector<int32_t> state_rows_;  ///< The samplers of the rows of the pass.
  MutableTensorView logprobs_;       ///< The pass has them in one buffer.
  bool in_place_ = false;            ///< The device writes logits directly to the caller's memory.
};

Arena TakeArena(const Model::Impl& model) {
  const std::lock_guard lock(model.mutex);
  if (model.arenas.empty()) return Arena(model.device);
  Arena arena = std::move(model.arenas.back());
  model.arenas.pop_back();
  return arena;
}

void GiveBack(const Model::Impl& model, Arena arena) {
  const std::lock_guard lock(model.mutex);
  model.arenas.push_back(std::move(arena));
}

}  // namespace

int64_t PaddedBlocks(const Model::Impl& model, int64_t blocks) {
  constexpr int64_t kBlocks = 8;
  return Internals::Impl(model.device).backend().records() ? RoundUp(blocks, kBlocks) : blocks;
}

Status RunForward(const Model::Impl& model, std::span<const SequenceInput> inputs,
                  const Wanted& wanted) {
  Arena arena = TakeArena(model);
  std::optional<Arena> of_host;
  if (model.host != nullptr) of_host = TakeArena(*model.host);
  Status status = ForwardCall(model, inputs, arena, of_host ? &*of_host : nullptr, wanted).Run();
  if (of_host) GiveBack(*model.host, *std::move(of_host));
  GiveBack(model, std::move(arena));
  return status;
}

}  // namespace marlin
