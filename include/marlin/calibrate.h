// Quantization with data: methods that measure what the layers of a model get as inputs.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/checkpoint.h"
#include "marlin/device.h"
#include "marlin/status.h"

#pragma GCC visibility push(default)
namespace marlin {

/// Which two weights of every four a matrix with 2:4 sparsity keeps.
enum class PruneMethod : uint8_t {
  kMagnitude,  ///< The two of largest decoded magnitude, with the codes of kMse.
  /// The two of largest magnitude times root mean square of their inputs, with the codes of
  /// kMse.
  kWeighted,
  /// Chosen together with the codes of kGptq, which compensate what is pruned.
  kCompensated,
};
/// "magnitude", "weighted", "compensated".
std::string_view PruneMethodName(PruneMethod method);
/// Finds a method by name. Errors: kInvalidArgument listing the known names.
Result<PruneMethod> ParsePruneMethod(std::string_view name);

/// The text whose tokens calibrate a model, and what it is used for.
struct CalibrationOptions {
  /// Token ids of the text, which is cut into windows of 256. Empty: sampled from the model itself,
  /// at temperature 1, which loads all of the model.
  std::vector<int32_t> text;
  /// Tokens to use, in windows spread evenly over the text; 0: 16384, or more where the model has
  /// layers with more than 7680 inputs.
  int64_t tokens = 0;
  uint64_t seed = 0;  ///< For the sampled text.
  /// For matrices that the recipe stores 2:4. Those without data are pruned by magnitude.
  PruneMethod pruning = PruneMethod::kCompensated;
  /// Counts the layers whose scales were searched, before anything is quantized; may be empty.
  Progress progress = {};
};

/// Quantizes a model's directory with a method that needs data (NeedsCalibration). With kGptq and
/// kAwqGptq it goes layer by layer: the inputs of a layer are those that it gets when all layers
/// before it are quantized. With kAwq and kAwqGptq the inputs' scales are searched first, in the
/// unquantized model; tensors are written multiplied with them. Matrices without data
/// (embeddings, layers that predict further tokens, tensors that are no part of the model) and
/// matrices with too few tokens are quantized with kMse; the report lists them, and experts that no
/// token selected, and the directory records them. The output depends on the source, the options
/// and the kind of device, not on the number of threads. Memory: about two layers, their Gram
/// matrices, and eight bytes per token and hidden feature. Errors: as QuantizeCheckpoint and
/// Model::Open; kInvalidArgument for another method, a token out of range, a text shorter than 2
/// tokens or too short for every matrix; kUnsupported if no matrix has data.
Result<QuantizeCheckpointReport> QuantizeCalibrated(const std::string& source,
                                                    const std::string& output, const Device& device,
                                                    const QuantizeCheckpointOptions& options,
                                                    const CalibrationOptions& calibration);

}  // namespace marlin
#pragma GCC visibility pop
