// The text of a calibration: windows, and the passes that they run in.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "calibrate/layer_run.h"
#include "marlin/calibrate.h"
#include "marlin/device.h"
#include "model/decoder_config.h"

namespace marlin {

/// Tokens of a window, or fewer where the model's context is shorter.
inline constexpr int64_t kCalibrationWindow = 256;

/// Errors: kInvalidArgument for a negative number of tokens, a text of one token, and a token that
/// is not in the vocabulary.
Status CheckCalibrationText(const CalibrationOptions& calibration, int64_t vocabulary);

/// Windows of `wanted` tokens together: of the text, or sampled from the model at `path`. Errors:
/// as Model::Open and Model::Decode.
Result<std::vector<std::vector<int32_t>>> CalibrationTexts(const std::string& path,
                                                           const DecoderConfig& config,
                                                           const Device& device,
                                                           const CalibrationOptions& options,
                                                           int64_t wanted);

/// Packs windows into passes of at most `most` tokens, or of one window, in order.
std::vector<WindowChunk> ChunksOf(std::span<const std::vector<int32_t>> texts, int64_t most);

/// The options that decide the output, for `--resume`.
std::string CalibrationIdentity(const CalibrationOptions& options);

/// FNV-1a of token ids, for identities of texts. `seed`: the hash of the ids before them.
uint64_t HashOf(std::span<const int32_t> tokens, uint64_t seed = 0xcbf29ce484222325U);

}  // namespace marlin
