#include "calibrate/calibration_text.h"

#include <fmt/core.h>

#include <algorithm>
#include <span>

#include "base/checked.h"
#include "base/errors.h"
#include "base/macros.h"
#include "base/split_mix64.h"
#include "engine/model_impl.h"
#include "marlin/model.h"
#include "marlin/sampling.h"

namespace marlin {
namespace {

/// A text's windows of up to `length` tokens, at most `count`, spread evenly.
std::vector<std::vector<int32_t>> Windows(const std::vector<int32_t>& text, int64_t length,
                                          int64_t count) {
  const auto tokens = static_cast<int64_t>(text.size());
  const int64_t all = std::max<int64_t>(tokens / length, 1);
  const int64_t used = std::min(all, count);
  std::vector<std::vector<int32_t>> windows;
  for (int64_t i = 0; i < used; ++i) {
    const int64_t first = i * all / used * length;
    windows.emplace_back(text.begin() + first, text.begin() + std::min(first + length, tokens));
  }
  return windows;
}

constexpr int64_t kSampledTogether = 32;

/// Extends a batch of sequences, each with its first token, to `length` tokens.
Status SampleBatch(const Model& model, int64_t length, SplitMix64& random,
                   std::span<std::vector<int32_t>> texts) {
  const int64_t vocab = model.info().vocab_size;
  const auto count = static_cast<int64_t>(texts.size());
  MARLIN_ASSIGN_OR_RETURN(const int64_t bytes, SamplerStateBytes(model.device(), vocab));
  MARLIN_ASSIGN_OR_RETURN(const DeviceBuffer memory,
                          DeviceBuffer::Allocate(model.device(), count * bytes));
  auto* const states = static_cast<uint8_t*>(memory.data());
  std::vector<Sequence> sequences;
  for (int64_t i = 0; i < count; ++i) {
    SamplingOptions options;
    options.temperature = 1.0F;
    options.seed = random.Next();
    MARLIN_RETURN_IF_ERROR(ResetSampler(model.device(), options, vocab, {nullptr, DType::kI32, {0}},
                                        {states + i * bytes, DType::kU8, {bytes}}));
    MARLIN_ASSIGN_OR_RETURN(Sequence sequence, model.NewSequence({.truncatable = false}));
    sequences.push_back(std::move(sequence));
  }
  // Without stop tokens all sequences take the same steps, up to the end of the context, which the
  // next call refuses.
  int64_t steps = length - 1;
  while (steps > 0) {
    const auto row = static_cast<size_t>(steps);
    std::vector<int32_t> tokens(texts.size() * row);
    std::vector<int64_t> counts(texts.size());
    std::vector<DecodeInput> inputs;
    for (size_t i = 0; i < texts.size(); ++i) inputs.push_back({&sequences[i], texts[i].back()});
    MARLIN_RETURN_IF_ERROR(model.Decode(inputs, {states, DType::kU8, {count, bytes}},
                                        {.steps = steps}, tokens, counts));
    for (size_t i = 0; i < texts.size(); ++i) {
      const auto sampled = std::span(tokens).subspan(i * row, static_cast<size_t>(counts[i]));
      texts[i].insert(texts[i].end(), sampled.begin(), sampled.end());
    }
    steps -= counts[0];
  }
  return {};
}

/// Samples `count` sequences of `length` tokens at temperature 1; each begins with a random token
/// of the vocabulary and does not end at end tokens.
Result<std::vector<std::vector<int32_t>>> SampleTexts(const Model& model, int64_t count,
                                                      int64_t length, uint64_t seed) {
  SplitMix64 random(seed);
  const auto vocab = static_cast<uint64_t>(model.info().vocab_size);
  std::vector<std::vector<int32_t>> texts(static_cast<size_t>(count));
  for (std::vector<int32_t>& text : texts) {
    text.reserve(static_cast<size_t>(length));
    text.push_back(static_cast<int32_t>(random.Next() % vocab));
  }
  const std::span all(texts);
  for (int64_t first = 0; first < count; first += kSampledTogether) {
    const auto batch = static_cast<size_t>(std::min(kSampledTogether, count - first));
    MARLIN_RETURN_IF_ERROR(
        SampleBatch(model, length, random, all.subspan(static_cast<size_t>(first), batch)));
  }
  return texts;
}

}  // namespace

Status CheckCalibrationText(const CalibrationOptions& calibration, int64_t vocabulary) {
  if (calibration.tokens < 0) {
    return Invalid(
        fmt::format("calibration tokens: expected 0 or more, got {}", calibration.tokens));
  }
  if (calibration.text.size() == 1)
    return Invalid("calibration text: expected 2 tokens or more, got 1");
  for (size_t i = 0; i < calibration.text.size(); ++i) {
    const int32_t token = calibration.text[i];
    if (token >= 0 && token < vocabulary) continue;
    return Invalid(
        fmt::format("calibration text: token {} is {}, expected 0..{}", i, token, vocabulary - 1));
  }
  return {};
}

Result<std::vector<std::vector<int32_t>>> CalibrationTexts(const std::string& path,
                                                           const DecoderConfig& config,
                                                           const Device& device,
                                                           const CalibrationOptions& options,
                                                           int64_t wanted) {
  const int64_t length = std::min(kCalibrationWindow, config.max_positions);
  const int64_t count = std::max<int64_t>(CeilDivide(wanted, length), 1);
  if (!options.text.empty()) return Windows(options.text, length, count);
  MARLIN_ASSIGN_OR_RETURN(const Model model, Model::Open(path, device));
  return SampleTexts(model, count, length, options.seed);
}

std::vector<WindowChunk> ChunksOf(std::span<const std::vector<int32_t>> texts, int64_t most) {
  std::vector<WindowChunk> chunks;
  int64_t tokens = 0;
  for (const std::vector<int32_t>& text : texts) {
    const auto rows = static_cast<int64_t>(text.size());
    if (chunks.empty() || chunks.back().rows + rows > most) {
      chunks.push_back({tokens, 0, {}});
    }
    chunks.back().windows.push_back(rows);
    chunks.back().rows += rows;
    tokens += rows;
  }
  return chunks;
}

std::string CalibrationIdentity(const CalibrationOptions& options) {
  return fmt::format("calibration {} {} {} {:016x} {}", options.tokens, options.seed,
                     options.text.size(), HashOf(options.text), PruneMethodName(options.pruning));
}

uint64_t HashOf(std::span<const int32_t> tokens, uint64_t seed) {
  uint64_t hash = seed;
  for (const int32_t token : tokens) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0x100000001b3U;
  }
  return hash;
}

}  // namespace marlin
