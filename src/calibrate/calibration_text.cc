#include "calibrate/calibration_text.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/checked.h"
#include "base/errors.h"
#include "base/macros.h"
#include "calibrate/sample_text.h"
#include "engine/model_impl.h"
#include "marlin/model.h"

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
