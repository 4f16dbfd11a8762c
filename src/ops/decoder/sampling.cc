#include "ops/decoder/sampling.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "base/aligned_buffer.h"
#include "base/checked.h"
#include "base/macros.h"
#include "ops/decoder/decoder_checks.h"
#include "ops/device/checks.h"
#include "ops/device/device.h"
#include "plan/step/decoder_calls.h"
#include "plan/step/sample_marks.h"

namespace marlin {
namespace {

Status CheckVocab(int64_t vocab) {
  if (vocab >= 1 && vocab <= kMostVocab) return {};
  return Invalid(fmt::format("vocab: expected 1..{}, got {}", kMostVocab, vocab));
}

Status CheckPenalty(const char* name, float penalty) {
  if (std::abs(penalty) <= static_cast<float>(kMostPenalty)) return {};
  return Invalid(
      fmt::format("{}: expected {} to {}, got {}", name, -kMostPenalty, kMostPenalty, penalty));
}

/// Checks the sampler states of `rows` sequences.
Status CheckStates(const char* name, const MutableTensorView& states, const Shape& expected) {
  if (states.dtype() != DType::kU8 || !(states.shape() == expected)) {
    return Invalid(fmt::format("{}: expected u8 {}, got {} {}", name, expected.ToString(),
                               DTypeName(states.dtype()), states.shape().ToString()));
  }
  MARLIN_RETURN_IF_ERROR(CheckMemory(name, states));
  const int64_t row_bytes = states.rank() == 2 && states.dim(0) > 1 ? states.stride(0) : 0;
  if (reinterpret_cast<uintptr_t>(states.data()) % kBufferAlignment == 0 &&
      row_bytes % kBufferAlignment == 0) {
    return {};
  }
  return Invalid(fmt::format("{}: must be aligned to {} bytes", name, kBufferAlignment));
}

Status CheckLogits(const TensorView& logits) {
  MARLIN_RETURN_IF_ERROR(CheckRank("logits", logits, 2));
  if (logits.dtype() != DType::kF32) {
    return Invalid(fmt::format("logits: expected f32, got {}", DTypeName(logits.dtype())));
  }
  return CheckActivations("logits", logits, logits.shape());
}

/// Checks contiguous f32 of a shape.
Status CheckFloats(const char* name, const TensorView& view, const Shape& expected) {
  if (view.dtype() != DType::kF32 || !(view.shape() == expected)) {
    return Invalid(fmt::format("{}: expected f32 {}, got {} {}", name, expected.ToString(),
                               DTypeName(view.dtype()), view.shape().ToString()));
  }
  if (!view.IsContiguous()) return Invalid(fmt::format("{}: must be contiguous", name));
  return CheckData(name, view);
}

/// Checks the masks of a call.
Status CheckMasks(const SampleTokensCall& call) {
  const TensorView& allowed = call.allowed;
  if (allowed.empty() && call.allowed_rows.empty()) return {};
  MARLIN_RETURN_IF_ERROR(CheckRank("allowed", allowed, 2));
  const Shape expected{allowed.dim(0), CeilDivide(call.logits.dim(1), 32)};
  if (allowed.dtype() != DType::kU32 || !(allowed.shape() == expected)) {
    return Invalid(fmt::format("allowed: expected u32 {}, got {} {}", expected.ToString(),
                               DTypeName(allowed.dtype()), allowed.shape().ToString()));
  }
  if (!allowed.IsContiguous()) return Invalid("allowed: must be contiguous");
  MARLIN_RETURN_IF_ERROR(CheckData("allowed", allowed));
  return CheckInt32("allowed_rows", call.allowed_rows, {call.logits.dim(0)});
}

}  // namespace

Status CheckSampling(const SamplingOptions& options) {
  if (!(options.temperature >= 0.0F) || !std::isfinite(options.temperature)) {
    return Invalid(fmt::format("temperature: expected 0 or more, got {}", options.temperature));
  }
  if (options.top_k < 0) {
    return Invalid(fmt::format("top_k: expected 0 or more, got {}", options.top_k));
  }
  if (!(options.top_p > 0.0F && options.top_p <= 1.0F)) {
    return Invalid(fmt::format("top_p: expected more than 0 and at most 1, got {}", options.top_p));
  }
  if (!(options.min_p >= 0.0F && options.min_p <= 1.0F)) {
    return Invalid(fmt::format("min_p: expected 0 to 1, got {}", options.min_p));
  }
  if (!(options.repetition_penalty >= static_cast<float>(kLeastRepetitionPenalty) &&
        options.repetition_penalty <= static_cast<float>(kMostRepetitionPenalty))) {
    return Invalid(fmt::format("repetition_penalty: expected {} to {}, got {}",
                               kLeastRepetitionPenalty, kMostRepetitionPenalty,
                               options.repetition_penalty));
  }
  MARLIN_RETURN_IF_ERROR(CheckPenalty("presence_penalty", options.presence_penalty));
  return CheckPenalty("frequency_penalty", options.frequency_penalty);
}

Result<int64_t> SamplerStateBytes(const Device& device, int64_t vocab) {
  MARLIN_ASSIGN_OR_RETURN(const DecoderBackend* decoder, DecoderOf(device));
  MARLIN_RETURN_IF_ERROR(CheckVocab(vocab));
  return decoder->sampler_state_bytes(vocab);
}

Status ResetSampler(const Device& device, const SamplingOptions& options, int64_t vocab,
                    const TensorView& prompt, const MutableTensorView& state, void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckSampling(options));
  MARLIN_ASSIGN_OR_RETURN(const int64_t bytes, SamplerStateBytes(device, vocab));
  MARLIN_RETURN_IF_ERROR(CheckRank("prompt", prompt, 1));
  MARLIN_RETURN_IF_ERROR(CheckInt32("prompt", prompt, {prompt.dim(0)}));
  MARLIN_RETURN_IF_ERROR(CheckStates("state", state, {bytes}));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("state", state, "prompt", prompt, false));
  return RunOperation(device, ResetSamplerCall{options, vocab, prompt, state}, stream);
}

Status SampleTokens(const Device& device, const TensorView& logits, const MutableTensorView& states,
                    const MutableTensorView& tokens, void* stream) {
  return SampleRows(device, {logits, states, tokens}, stream);
}

Status SampleRows(const Device& device, const SampleTokensCall& call, void* stream) {
  const auto& [logits, states, tokens, state_rows, marks, allowed, allowed_rows, drafts] = call;
  MARLIN_RETURN_IF_ERROR(CheckLogits(logits));
  const int64_t rows = logits.dim(0);
  MARLIN_ASSIGN_OR_RETURN(const int64_t bytes, SamplerStateBytes(device, logits.dim(1)));
  int64_t count = rows;
  if (!state_rows.empty()) {
    MARLIN_RETURN_IF_ERROR(CheckInt32("state_rows", state_rows, {rows}));
    MARLIN_RETURN_IF_ERROR(CheckRank("states", states, 2));
    count = states.dim(0);
  }
  MARLIN_RETURN_IF_ERROR(CheckStates("states", states, {count, bytes}));
  MARLIN_RETURN_IF_ERROR(CheckInt32("tokens", tokens, {rows}));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("tokens", tokens, "logits", logits, false));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("tokens", tokens, "states", states, false));
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("states", states, "logits", logits, false));
  MARLIN_RETURN_IF_ERROR(CheckMasks(call));
  if (!drafts.empty()) {
    MARLIN_RETURN_IF_ERROR(CheckInt32("drafts", drafts, {rows}));
    if (state_rows.empty()) return Invalid("drafts: expected state_rows, too");
  }
  const std::pair<const char*, const TensorView*> inputs[] = {{"state_rows", &state_rows},
                                                              {"allowed", &allowed},
                                                              {"allowed_rows", &allowed_rows},
                                                              {"drafts", &drafts}};
  for (const auto& [name, view] : inputs) {
    if (view->empty()) continue;
    MARLIN_RETURN_IF_ERROR(CheckNoOverlapWithIndices("tokens", tokens, name, *view));
    MARLIN_RETURN_IF_ERROR(CheckNoOverlapWithIndices("states", states, name, *view));
  }
  if (rows == 0) return {};
  return RunOperation(device, call, stream);
}

Status LogProbabilities(const Device& device, const TensorView& logits, const TensorView& ids,
                        const LogProbabilityRows& out, void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckLogits(logits));
  const int64_t rows = logits.dim(0);
  MARLIN_RETURN_IF_ERROR(CheckVocab(logits.dim(1)));
  MARLIN_RETURN_IF_ERROR(CheckInt32("ids", ids, {rows}));
  MARLIN_RETURN_IF_ERROR(CheckRank("likely_ids", out.likely_ids, 2));
  const int64_t likely = out.likely_ids.dim(1);
  const int64_t most = std::min(kMostLikelyTokens, logits.dim(1));
  if (likely < 0 || likely > most) {
    return Invalid(fmt::format("likely_ids: expected 0..{} columns, got {}", most, likely));
  }
  MARLIN_RETURN_IF_ERROR(CheckInt32("likely_ids", out.likely_ids, {rows, likely}));
  MARLIN_RETURN_IF_ERROR(CheckFloats("of_ids", out.of_ids, {rows}));
  MARLIN_RETURN_IF_ERROR(CheckFloats("of_likely", out.of_likely, {rows, likely}));
  const std::pair<const char*, const MutableTensorView*> outputs[] = {
      {"of_ids", &out.of_ids}, {"likely_ids", &out.likely_ids}, {"of_likely", &out.of_likely}};
  for (size_t i = 0; i < std::size(outputs); ++i) {
    const auto& [name, view] = outputs[i];
    MARLIN_RETURN_IF_ERROR(CheckNoOverlapWithIndices(name, *view, "ids", ids));
    MARLIN_RETURN_IF_ERROR(CheckNoOverlap(name, *view, "logits", logits, false));
    for (size_t j = 0; j < i; ++j) {
      MARLIN_RETURN_IF_ERROR(
          CheckNoOverlapWithIndices(name, *view, outputs[j].first, *outputs[j].second));
    }
  }
  if (rows == 0) return {};
  return RunOperation(device, LogProbabilitiesCall{logits, ids, out}, stream);
}

Status AdvanceTokens(const Device& device, const TensorView& sampled, const StepAdvance& advance,
                     void* stream) {
  MARLIN_RETURN_IF_ERROR(CheckRank("sampled", sampled, 1));
  const int64_t rows = sampled.dim(0);
  MARLIN_RETURN_IF_ERROR(CheckInt32("sampled", sampled, {rows}));
  MARLIN_RETURN_IF_ERROR(CheckRank("stop_ids", advance.stop_ids, 1));
  MARLIN_RETURN_IF_ERROR(CheckInt32("stop_ids", advance.stop_ids, {advance.stop_ids.dim(0)}));
  MARLIN_RETURN_IF_ERROR(CheckRank("tokens", advance.tokens, 2));
  MARLIN_RETURN_IF_ERROR(CheckInt32("tokens", advance.tokens, {rows, advance.tokens.dim(1)}));
  struct Named {
    const char* name;
    const MutableTensorView* view;
  };
  const Named outputs[] = {{"ids", &advance.ids},
                           {"positions", &advance.positions},
                           {"state_rows", &advance.state_rows},
                           {"counts", &advance.counts},
                           {"tokens", &advance.tokens}};
  for (size_t i = 0; i < std::size(outputs); ++i) {
    const auto& [name, view] = outputs[i];
    if (view != &advance.tokens) MARLIN_RETURN_IF_ERROR(CheckInt32(name, *view, {rows}));
    MARLIN_RETURN_IF_ERROR(CheckNoOverlapWithIndices(name, *view, "sampled", sampled));
    MARLIN_RETURN_IF_ERROR(CheckNoOverlapWithIndices(name, *view, "stop_ids", advance.stop_ids));
    for (size_t j = 0; j < i; ++j) {
      MARLIN_RETURN_IF_ERROR(
          CheckNoOverlapWithIndices(name, *view, outputs[j].name, *outputs[j].view));
    }
  }
  if (rows == 0) return {};
  return RunOperation(device,
                      AdvanceTokensCall{sampled, advance.stop_ids, advance.ids, advance.positions,
                                        advance.state_rows, advance.counts, advance.tokens},
                      stream);
}

}  // namespace marlin
