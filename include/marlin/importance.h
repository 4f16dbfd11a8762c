// Importance matrices: how large the inputs of a model's matrices are, measured on a text.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/checkpoint.h"
#include "marlin/status.h"

#pragma GCC visibility push(default)
namespace marlin {

/// llama.cpp's importance matrix. Names are those of GGUF: "blk.0.attn_q.weight".
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
  /// Errors: kIo, and those of FromBytes.
  static Result<ImportanceMatrix> FromFile(const std::string& path);
  /// As a GGUF file; `dataset` names the text.
  std::string ToGguf(const std::string& dataset) const;

  friend bool operator==(const ImportanceMatrix&, const ImportanceMatrix&) = default;
};

/// Quantizes with options.method kMse, each error weighted by the mean square of its input.
/// Matrices without inputs are quantized unweighted and listed in the report, as are experts that
/// saw no token. Errors: those of QuantizeCheckpoint; kInvalidArgument for another method and for
/// inputs of another number than the matrix's; kUnsupported for a model_type that GGUF has no names
/// for.
Result<QuantizeCheckpointReport> QuantizeWithImportance(const std::string& source,
                                                        const std::string& output,
                                                        const QuantizeCheckpointOptions& options,
                                                        const ImportanceMatrix& importance);

}  // namespace marlin
#pragma GCC visibility pop
