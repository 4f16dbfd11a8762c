#include "calibrate/sample_text.h"

#include <algorithm>
#include <span>

#include "base/macros.h"
#include "base/split_mix64.h"
#include "marlin/sampling.h"

namespace marlin {
namespace {

constexpr int64_t kBatch = 32;

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

}  // namespace

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
  for (int64_t first = 0; first < count; first += kBatch) {
    const auto batch = static_cast<size_t>(std::min(kBatch, count - first));
    MARLIN_RETURN_IF_ERROR(
        SampleBatch(model, length, random, all.subspan(static_cast<size_t>(first), batch)));
  }
  return texts;
}

}  // namespace marlin
