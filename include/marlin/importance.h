// Importance matrices: how large the inputs of a model's matrices are, measured on a text.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/calibrate.h"
#include "marlin/checkpoint.h"
#include "marlin/device.h"
#include "marlin/status.h"

#pragma GCC visibility push(default)
namespace marlin {

/// llama.cpp's importance matrix. Names are as in GGUF: "blk.0.attn_q.weight".
struct ImportanceMatrix {
  struct Inputs {
    int64_t experts = 1;
    int64_t k = 0;
    std::vector<float> mean_squares;  ///< [experts, k]: the mean square of each input.
    std::vector<float> counts;        ///< [experts]: tokens that were seen; 0: no mean is known.

    friend bool operator==(const Inputs&, const Inputs&) = default;
  };
  std::map<std::string, Inputs, std::less<>> inputs;

  /// Reads both forms: a GGUF file of general.type "imatrix", and the older binary form. Errors:
  /// kMalformedFile naming `file` and what is wrong; kUnsupported for a GGUF version.
  static Result<ImportanceMatrix> FromBytes(std::string_view bytes, const std::string& file);
  /// Errors: kIo, and as FromBytes.
  static Result<ImportanceMatrix> FromFile(const std::string& path);
  /// As a GGUF file with the metadata that llama.cpp's llama-quantize requires; `dataset` names the
  /// text. Sums are stored in fp32, so that means read back may differ in their last bit.
  std::string ToGguf(const std::string& dataset) const;
  /// {"inputs": [{"name", "experts", "k", "counts": [...], "mean_square"}]}: the last is the mean
  /// over all inputs of the experts that saw tokens.
  std::string SummaryJson() const;

  friend bool operator==(const ImportanceMatrix&, const ImportanceMatrix&) = default;
};

/// Options of MeasureImportance.
struct ImportanceOptions {
  /// The text, in windows of 256 tokens. tokens: 0 is 16384. `pruning` is not used.
  CalibrationOptions text = {};
  std::function<void(int64_t done, int64_t total)> progress = {};  ///< In layers.
};

/// Runs an unquantized model over a text, layer by layer, and measures the inputs of every matrix,
/// for experts over the tokens that select them. The head is among them unless it shares the
/// embedding's table. The result depends on the source, the options and the kind of device, not on
/// the number of threads. Memory: one layer, and 4 bytes per token and hidden feature, besides the
/// model while it samples a text. Errors: as Model::Open; kInvalidArgument for a quantized
/// model, a token out of range, a text shorter than 2 tokens; kUnsupported for a model_type or a
/// tensor that GGUF has no name for; kNonFiniteInput for inputs whose squares overflow.
Result<ImportanceMatrix> MeasureImportance(const std::string& source, const Device& device,
                                           const ImportanceOptions& options = {});

/// Quantizes with options.method kMse, each error weighted by the mean square of its input.
/// Matrices without inputs are quantized unweighted and listed in the report, as are experts that
/// saw no token. Errors: as QuantizeCheckpoint; kInvalidArgument for another method and for
/// inputs of another number than the matrix's; kUnsupported for a model_type that GGUF has no names
/// for.
Result<QuantizeCheckpointReport> QuantizeWithImportance(const std::string& source,
                                                        const std::string& output,
                                                        const QuantizeCheckpointOptions& options,
                                                        const ImportanceMatrix& importance);

}  // namespace marlin
#pragma GCC visibility pop
