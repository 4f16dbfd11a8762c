// Sampling: sampler states, tokens and log-probabilities, a threadgroup per row.
#include <fmt/core.h>

#include <algorithm>

#include "backends/metal/decoder/operations.h"
#include "backends/metal/gemm/product_launches.h"
#include "backends/metal/kernels/sampling/sample_parameters.h"
#include "base/macros.h"
#include "plan/step/sample_marks.h"
#include "plan/step/sampler_states.h"

namespace marlin::metal {
namespace {

/// Rows times tokens in a launch: below half a second on a GPU of seven cores, each of which takes
/// some 15 ns per token of a row with top-k and top-p by the kernel's instruction counts.
constexpr int64_t kMostTokensOfPart = int64_t{1} << 27;
/// A row has one core. Longer ones run on the host.
constexpr int64_t kMostVocabOfRow = int64_t{1} << 24;

int64_t RowsOfPart(int64_t vocab) { return std::max<int64_t>(kMostTokensOfPart / vocab, 1); }

/// A buffer, or an absent one: bound to memory that is not read.
KernelBuffer Bound(int index, const TensorView& view, const void* absent, int64_t absent_bytes) {
  if (view.empty()) return {index, absent, absent_bytes};
  return {index, view.data(), view.ElementCount() * DTypeBytes(view.dtype())};
}

/// The buffer of contiguous results that are written whole.
KernelBuffer Written(int index, const MutableTensorView& view) {
  return {index, view.data(), view.ElementCount() * DTypeBytes(view.dtype()), true, false};
}

KernelBuffer Errors(std::span<ErrorWords::Word> words) {
  return {MARLIN_BUFFER_SAMPLE_ERRORS, words.data(), static_cast<int64_t>(words.size_bytes()), true,
          true};
}

KernelBuffer Logits(const TensorView& logits) {
  const int64_t bytes = ExtentBytes(logits.dim(0), logits.dim(1), logits.stride(0), logits.dtype());
  return {MARLIN_BUFFER_LOGITS, logits.data(), bytes};
}

KernelLaunch RowLaunch(std::string_view source, std::string_view function, int64_t rows) {
  KernelLaunch launch;
  launch.source = source;
  launch.function = function;
  launch.threadgroups[0] = static_cast<uint32_t>(rows);
  launch.threads = kernels::kSampleThreads;
  return launch;
}

/// Numbers of a call that messages need.
struct SampledCall {
  int64_t states;
  int64_t vocab;
  bool marks;
};

Status StateError(const SampledCall& call, const ErrorWords::Word& word, int64_t row) {
  if (word.id == kernels::kNoSuchState) {
    return Status(Code::kInvalidArgument,
                  fmt::format("state_rows: expected less than {}, got {} at {}", call.states,
                              word.selection, row));
  }
  return Status(Code::kInvalidArgument, fmt::format("states: row {} was not reset for {} tokens",
                                                    word.selection, call.vocab));
}

/// The error of a call whose rows have reported words.
Status ErrorOfRows(const SampledCall& call, CallContext::Words words) {
  for (size_t row = 0; row < words.size(); ++row) {
    if (words[row].id > 0) return StateError(call, words[row], static_cast<int64_t>(row));
  }
  for (const ErrorWords::Word& word : words) {
    Status error = call.marks ? Status() : marlin::SampleError(word.id);
    if (error.ok()) continue;
    if (call.states == 1) return error;
    return error.WithContext(fmt::format("row {}", word.selection));
  }
  return Status();
}

kernels::SampleParameters ParametersOf(const SampleTokensCall& call) {
  kernels::SampleParameters p{};
  p.logits_stride = call.logits.stride(0);
  p.state_bytes = call.states.stride(0);
  p.rows = static_cast<int32_t>(call.logits.dim(0));
  p.states = static_cast<int32_t>(call.states.dim(0));
  p.vocab = static_cast<int32_t>(call.logits.dim(1));
  p.has_state_rows = call.state_rows.empty() ? 0 : 1;
  p.has_drafts = call.drafts.empty() ? 0 : 1;
  p.masks = call.allowed.empty() ? 0 : static_cast<int32_t>(call.allowed.dim(0));
  p.mask_words = call.allowed.empty() ? 0 : static_cast<int32_t>(call.allowed.dim(1));
  return p;
}

}  // namespace

bool Takes(const ResetSamplerCall& call, const DeviceShape& /*shape*/) {
  return call.vocab <= kMostVocabOfRow && call.prompt.dim(0) <= kMostVocabOfRow;
}

Status Launch(const ResetSamplerCall& call, CallContext* context) {
  const int64_t vocab = call.vocab;
  const auto error_of = [vocab](CallContext::Words words) {
    return Status(Code::kInvalidArgument, fmt::format("prompt: expected 0..{}, got {} at {}",
                                                      vocab - 1, words[0].id, words[0].selection));
  };
  MARLIN_ASSIGN_OR_RETURN(const std::span<ErrorWords::Word> words,
                          context->TakeWords(2, {-1, 0}, error_of));
  KernelLaunch launch = RowLaunch("sample_tokens.metal", "reset_sampler", 1);
  launch.other_parameters = ParameterBlock(
      kernels::ResetParameters{DrawOptionsOf(call.options), call.prompt.dim(0), call.vocab});
  const int64_t bytes = call.state.dim(0);
  launch.buffers.push_back({MARLIN_BUFFER_SAMPLER_STATES, call.state.data(), bytes, true, false});
  // The second word stands for an absent prompt.
  launch.buffers.push_back(
      Bound(MARLIN_BUFFER_PROMPT, call.prompt, &words[1], sizeof(ErrorWords::Word)));
  launch.buffers.push_back(Errors(words.first(1)));
  context->launches.push_back(std::move(launch));
  return Status();
}

bool Takes(const SampleTokensCall& call, const DeviceShape& /*shape*/) {
  return call.logits.dim(1) <= kMostVocabOfRow;
}

Status Launch(const SampleTokensCall& call, CallContext* context) {
  const int64_t rows = call.logits.dim(0);
  const SampledCall sampled{call.states.dim(0), call.logits.dim(1), call.marks};
  const auto error_of = [sampled](CallContext::Words words) { return ErrorOfRows(sampled, words); };
  MARLIN_ASSIGN_OR_RETURN(const std::span<ErrorWords::Word> words,
                          context->TakeWords(rows, {-1, 0}, error_of));
  kernels::SampleParameters p = ParametersOf(call);
  const KernelBuffer logits = Logits(call.logits);
  const auto bound = [&](int index, const TensorView& view) {
    return Bound(index, view, logits.data, logits.bytes);
  };
  const int64_t most = RowsOfPart(call.logits.dim(1));
  for (int64_t first = 0; first < rows; first += most) {
    KernelLaunch launch =
        RowLaunch("sample_tokens.metal", "sample_tokens", std::min(most, rows - first));
    p.first_row = static_cast<int32_t>(first);
    launch.other_parameters = ParameterBlock(p);
    launch.buffers.push_back(logits);
    launch.buffers.push_back({MARLIN_BUFFER_SAMPLER_STATES, call.states.data(),
                              ExtentBytes(call.states.dim(0), call.states.dim(1),
                                          call.states.stride(0), call.states.dtype()),
                              true, true});
    launch.buffers.push_back({MARLIN_BUFFER_TOKENS, call.tokens.data(),
                              rows * int64_t{sizeof(int32_t)}, true, first > 0});
    launch.buffers.push_back(bound(MARLIN_BUFFER_STATE_ROWS, call.state_rows));
    launch.buffers.push_back(bound(MARLIN_BUFFER_ALLOWED, call.allowed));
    launch.buffers.push_back(bound(MARLIN_BUFFER_ALLOWED_ROWS, call.allowed_rows));
    launch.buffers.push_back(bound(MARLIN_BUFFER_DRAFTS, call.drafts));
    launch.buffers.push_back(Errors(words));
    context->launches.push_back(std::move(launch));
  }
  return Status();
}

bool Takes(const LogProbabilitiesCall& call, const DeviceShape& /*shape*/) {
  return call.logits.dim(1) <= kMostVocabOfRow;
}

Status Launch(const LogProbabilitiesCall& call, CallContext* context) {
  const int64_t rows = call.logits.dim(0);
  const int64_t vocab = call.logits.dim(1);
  const auto error_of = [vocab](CallContext::Words words) {
    const auto has_error = [](const ErrorWords::Word& word) { return word.selection == 0; };
    const auto first = std::find_if(words.begin(), words.end(), has_error);
    return Status(Code::kInvalidArgument, fmt::format("ids: expected 0..{}, got {} at {}",
                                                      vocab - 1, first->id, first - words.begin()));
  };
  MARLIN_ASSIGN_OR_RETURN(const std::span<ErrorWords::Word> words,
                          context->TakeWords(rows, {-1, 0}, error_of));
  kernels::LogProbabilityParameters p{};
  p.logits_stride = call.logits.stride(0);
  p.vocab = static_cast<int32_t>(vocab);
  p.likely = static_cast<int32_t>(call.out.likely_ids.dim(1));
  const int64_t most = RowsOfPart(vocab);
  for (int64_t first = 0; first < rows; first += most) {
    KernelLaunch launch = RowLaunch("sample_log_probabilities.metal", "log_probabilities",
                                    std::min(most, rows - first));
    p.first_row = static_cast<int32_t>(first);
    launch.other_parameters = ParameterBlock(p);
    const KernelBuffer logits = Logits(call.logits);
    launch.buffers.push_back(logits);
    launch.buffers.push_back(Bound(MARLIN_BUFFER_SAMPLE_IDS, call.ids, nullptr, 0));
    launch.buffers.push_back(Written(MARLIN_BUFFER_OF_IDS, call.out.of_ids));
    if (p.likely > 0) {
      launch.buffers.push_back(Written(MARLIN_BUFFER_LIKELY_IDS, call.out.likely_ids));
      launch.buffers.push_back(Written(MARLIN_BUFFER_OF_LIKELY, call.out.of_likely));
    } else {
      launch.buffers.push_back({MARLIN_BUFFER_LIKELY_IDS, logits.data, logits.bytes});
      launch.buffers.push_back({MARLIN_BUFFER_OF_LIKELY, logits.data, logits.bytes});
    }
    launch.buffers.push_back(Errors(words));
    context->launches.push_back(std::move(launch));
  }
  return Status();
}

}  // namespace marlin::metal
