#include "engine/batch/batch_pass.h"

#include <algorithm>
#include <new>

#include "base/internals.h"
#include "base/macros.h"
#include "engine/decode_call.h"
#include "engine/forward_call.h"
#include "engine/model_impl.h"
#include "plan/step/sample_marks.h"

namespace marlin {
namespace {

/// The sampler state of each row; none if they are in order.
std::vector<int32_t> SamplerRows(const BatchSlots& slots, std::span<BatchText* const> texts) {
  std::vector<int32_t> rows;
  if (texts.size() == slots.texts().size()) return rows;
  for (const BatchText* const text : texts) rows.push_back(static_cast<int32_t>(text->slot));
  return rows;
}

/// Memory of the host may run out like memory of the device.
template <typename Call>
Status WithMemory(const Call& call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "forward: cannot allocate");
  }
}

}  // namespace

Status SampledTexts::ErrorOf(size_t i) const {
  const auto count = static_cast<size_t>(counts[i]);
  return count < steps ? SampleError(tokens[i * steps + count]) : Status();
}

Status DecodeTexts(const Model& model, const BatchSlots& slots, int64_t steps,
                   SampledTexts* sampled) {
  std::vector<DecodeInput> inputs;
  std::vector<int32_t> stops;
  sampled->texts.assign(slots.texts().begin(), slots.texts().end());
  for (BatchText* const text : sampled->texts) {
    inputs.push_back({&*text->sequence, text->tokens.back()});
    stops.insert(stops.end(), text->stops.begin(), text->stops.end());
  }
  std::sort(stops.begin(), stops.end());
  stops.erase(std::unique(stops.begin(), stops.end()), stops.end());
  sampled->steps = static_cast<size_t>(steps);
  sampled->tokens.assign(inputs.size() * sampled->steps, 0);
  sampled->counts.assign(inputs.size(), 0);
  const DecodeCall call{inputs, slots.states(), {steps, stops}, sampled->tokens, sampled->counts};
  return WithMemory([&] { return RunDecode(Internals::Impl(model), call); });
}

Status FeedTexts(const Model& model, const BatchSlots& slots, std::span<BatchText* const> running,
                 SampledTexts* sampled) {
  std::vector<SequenceInput> inputs;
  for (BatchText* const text : slots.texts()) {
    if (text->piece == 0) continue;
    inputs.push_back({&*text->sequence, text->next()});
    sampled->texts.push_back(text);
  }
  for (BatchText* const text : running) {
    if (text->piece == 0 || text->slot >= 0) continue;
    inputs.push_back({.sequence = &*text->sequence, .tokens = text->next(), .feed_only = true});
  }
  if (inputs.empty()) return {};
  sampled->tokens.assign(sampled->texts.size(), 0);
  sampled->counts.assign(sampled->texts.size(), 0);
  const std::vector<int32_t> rows = SamplerRows(slots, sampled->texts);
  Wanted wanted;
  wanted.samplers = slots.states();
  wanted.tokens = sampled->tokens;
  wanted.sampler_rows = rows;
  MARLIN_RETURN_IF_ERROR(
      WithMemory([&] { return RunForward(Internals::Impl(model), inputs, wanted); }));
  for (size_t i = 0; i < sampled->tokens.size(); ++i) {
    sampled->counts[i] = sampled->tokens[i] >= 0 ? 1 : 0;
  }
  return {};
}

}  // namespace marlin
