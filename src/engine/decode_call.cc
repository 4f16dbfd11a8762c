#include "engine/decode_call.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <vector>

#include "base/checked.h"
#include "base/macros.h"
#include "engine/forward_call.h"
#include "engine/kv_cache.h"
#include "engine/model_impl.h"
#include "engine/recorded_steps.h"
#include "ops/device/device.h"
#include "plan/step/sample_marks.h"

namespace marlin {
namespace {

/// The passes of a call. Sequences that have ended leave it after a pass, so that those that run
/// have all taken the same number of steps.
class DecodeLoop {
 public:
  DecodeLoop(const Model::Impl& model, const DecodeCall& call)
      : model_(model),
        call_(call),
        running_(call.inputs.size()),
        next_(call.inputs.size()),
        records_(RecordsSteps()) {
    std::iota(running_.begin(), running_.end(), 0);
    for (size_t i = 0; i < next_.size(); ++i) next_[i] = call.inputs[i].token;
    for (const DecodeInput& input : call.inputs) {
      std::vector<float>& hidden = hidden_.emplace_back(input.hidden.begin(), input.hidden.end());
      hidden.resize(std::max(hidden.size(), input.hidden_out.size()));
    }
    std::fill(call.counts.begin(), call.counts.end(), 0);
    std::fill(call.tokens.begin(), call.tokens.end(), 0);
  }

  Status Run() {
    while (!running_.empty() && taken_ < call_.options.steps) {
      const int64_t steps = StepsOfPass();
      MARLIN_RETURN_IF_ERROR(steps == 1 ? RunOne() : RunSeveral(steps));
    }
    for (size_t i = 0; i < hidden_.size(); ++i) {
      std::copy_n(hidden_[i].begin(), call_.inputs[i].hidden_out.size(),
                  call_.inputs[i].hidden_out.begin());
    }
    return {};
  }

  int64_t taken() const { return taken_; }

 private:
  KvCache& CacheOf(int32_t input) const { return SequenceOf(input)->state()->cache; }
  Sequence* SequenceOf(int32_t input) const {
    return call_.inputs[static_cast<size_t>(input)].sequence;
  }
  bool Stops(int32_t token) const {
    const std::span<const int32_t> stops = call_.options.stop_token_ids;
    return std::find(stops.begin(), stops.end(), token) != stops.end();
  }

  /// Whether a pass of the device can have several steps.
  bool RecordsSteps() const {
    const DecoderBackend* const decoder = Internals::Impl(model_.device).decoder();
    return Internals::Impl(model_.device).backend().records() && decoder != nullptr &&
           decoder->Has(DecoderOperation::kAdvanceTokens) && model_.decoder.host_experts == 0 &&
           model_.host == nullptr;
  }

  /// The steps of the next pass: a number that all sequences have room for and that gives the same
  /// bits as passes of one step. With more than one, the pages are reserved.
  int64_t StepsOfPass() {
    const auto rows = static_cast<int64_t>(running_.size());
    const int64_t most_rows = std::min({RecordedSteps::kMostRows, kPassTokens,
                                        Internals::Impl(model_.device).backend().pass_tokens()});
    int64_t room = std::min(call_.options.steps - taken_, kMostDecodeSteps);
    if (!records_ || rows > most_rows) room = 1;
    for (const int32_t input : running_) {
      room = std::min(room, model_.info.max_positions - CacheOf(input).length());
    }
    auto steps =
        static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(room, 1))));
    while (steps > 1 && !(HasShapesOfOne(steps) && Reserve(steps))) steps /= 2;
    return steps;
  }

  /// Whether every step of a pass has the kernels and shapes of a pass of one step: the same block
  /// tables, which decide how attention splits its keys, and no expanded pages.
  bool HasShapesOfOne(int64_t steps) const {
    for (size_t group = 0; group < model_.pool->groups(); ++group) {
      if (model_.pool->IsRecurrent(group)) continue;
      if (BlocksOf(group, steps) != BlocksOf(group, 1)) return false;
    }
    std::vector<PassSequence> sequences;
    for (int64_t step = 1; step <= steps; ++step) {
      sequences.clear();
      for (const int32_t input : running_) {
        sequences.push_back({1, CacheOf(input).length() + step});
      }
      if (Expands(sequences)) return false;
    }
    return true;
  }

  bool Expands(std::span<const PassSequence> sequences) const {
    const PassSetting setting = model_.setting();
    for (size_t group = 0; group < model_.pool->groups(); ++group) {
      const auto layer = static_cast<size_t>(model_.pool->FirstLayerOf(group));
      if (model_.decoder.layers[layer].mixer.mixer->Expands(setting, sequences)) return true;
    }
    return false;
  }

  /// The blocks of a group's tables in a pass.
  int64_t BlocksOf(size_t group, int64_t steps) const {
    int64_t most = 0;
    for (const int32_t input : running_) {
      const KvCache& cache = CacheOf(input);
      most = std::max({most, static_cast<int64_t>(cache.Blocks(group).size()),
                       CeilDivide(cache.length() + steps, model_.pool->page_tokens())});
    }
    return PaddedBlocks(model_, most);
  }

  /// Reserves the pages of a pass. False: the memory has no room for them, and nothing is kept that
  /// a pass of one step does not need, since the next one may be another sequence's.
  bool Reserve(int64_t steps) const {
    for (const int32_t input : running_) {
      KvCache& cache = CacheOf(input);
      if (cache.Reserve(cache.length(), cache.length() + steps).ok()) continue;
      for (const int32_t other : running_) CacheOf(other).Release(CacheOf(other).length() + 1);
      return false;
    }
    return true;
  }

  std::vector<SequenceInput> InputsOfPass() {
    std::vector<SequenceInput> inputs;
    inputs.reserve(running_.size());
    for (const int32_t input : running_) {
      const auto at = static_cast<size_t>(input);
      // A pass reads the hidden states before it writes those after its last step.
      inputs.push_back(
          {.sequence = SequenceOf(input), .tokens = {&next_[at], 1}, .hidden_out = hidden_[at]});
      if (model_.decoder.joins()) inputs.back().hidden = hidden_[at];
    }
    return inputs;
  }

  Status RunOne() {
    std::vector<int32_t> tokens(running_.size());
    Wanted wanted;
    wanted.samplers = call_.samplers;
    wanted.tokens = tokens;
    // While all sequences run, the pass is one of ForwardAndSample, with the same recording.
    if (running_.size() < call_.inputs.size()) wanted.sampler_rows = running_;
    MARLIN_RETURN_IF_ERROR(RunForward(model_, InputsOfPass(), wanted));
    std::vector<int32_t> counts(tokens.size());
    std::transform(tokens.begin(), tokens.end(), counts.begin(),
                   [](int32_t token) { return token >= 0 ? 1 : 0; });
    Take(1, counts, tokens);
    return {};
  }

  Status RunSeveral(int64_t steps) {
    std::vector<int32_t> tokens(running_.size() * static_cast<size_t>(steps));
    std::vector<int32_t> counts(running_.size());
    const StepsWanted several{steps, call_.options.stop_token_ids, tokens, counts};
    Wanted wanted;
    wanted.samplers = call_.samplers;
    wanted.sampler_rows = running_;
    wanted.steps = &several;
    MARLIN_RETURN_IF_ERROR(RunForward(model_, InputsOfPass(), wanted));
    if (model_.pool->HasStates()) MARLIN_RETURN_IF_ERROR(FeedAgain(steps, counts, tokens));
    Take(steps, counts, tokens);
    return {};
  }

  /// Feeds what several steps have fed to the sequences that they left unchanged: those with a
  /// recurrent state and a row that could not be sampled.
  Status FeedAgain(int64_t steps, std::span<const int32_t> counts,
                   std::span<const int32_t> tokens) const {
    for (size_t row = 0; row < running_.size(); ++row) {
      const auto first = row * static_cast<size_t>(steps);
      const auto count = static_cast<size_t>(counts[row]);
      if (counts[row] == 0 || counts[row] == steps || tokens[first + count] == kNoToken) continue;
      std::vector<int32_t> fed = {next_[static_cast<size_t>(running_[row])]};
      const auto sampled = tokens.subspan(first, count - 1);
      fed.insert(fed.end(), sampled.begin(), sampled.end());
      const SequenceInput input{
          .sequence = SequenceOf(running_[row]), .tokens = fed, .feed_only = true};
      MARLIN_RETURN_IF_ERROR(RunForward(model_, {&input, 1}, Wanted()));
    }
    return {};
  }

  /// Takes over the tokens of a pass, [running, steps], and drops the sequences that have ended.
  void Take(int64_t steps, std::span<const int32_t> counts, std::span<const int32_t> tokens) {
    std::vector<int32_t> still;
    for (size_t row = 0; row < running_.size(); ++row) {
      const int32_t input = running_[row];
      const auto at = static_cast<size_t>(input);
      const auto count = static_cast<size_t>(counts[row]);
      const auto of_row = tokens.subspan(row * static_cast<size_t>(steps), count);
      const bool stops = !of_row.empty() && Stops(of_row.back());
      // A row that ended without a stop token has a mark after its tokens.
      const bool fails = !stops && counts[row] < steps;
      const size_t first =
          at * static_cast<size_t>(call_.options.steps) + static_cast<size_t>(taken_);
      std::copy_n(of_row.data(), count + (fails ? 1 : 0),
                  call_.tokens.begin() + static_cast<std::ptrdiff_t>(first));
      call_.counts[at] += counts[row];
      const bool full = CacheOf(input).length() == model_.info.max_positions;
      if (stops || full || fails) {
        CacheOf(input).Release(CacheOf(input).length());
        continue;
      }
      next_[at] = of_row.back();
      still.push_back(input);
    }
    running_ = std::move(still);
    taken_ += steps;
  }

  const Model::Impl& model_;
  const DecodeCall& call_;
  std::vector<int32_t> running_;            ///< Inputs.
  std::vector<int32_t> next_;               ///< The token that each input feeds next.
  std::vector<std::vector<float>> hidden_;  ///< Before that token; empty where none is wanted.
  const bool records_;
  int64_t taken_ = 0;
};

}  // namespace

Status RunDecode(const Model::Impl& model, const DecodeCall& call, int64_t* steps_run) {
  DecodeLoop loop(model, call);
  Status status = loop.Run();
  if (steps_run != nullptr) *steps_run = loop.taken();
  return status;
}

}  // namespace marlin
