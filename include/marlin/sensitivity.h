// How much quantizing each matrix of a model harms it, and recipes that follow from that.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "marlin/calibrate.h"
#include "marlin/device.h"
#include "marlin/recipe.h"
#include "marlin/status.h"
#include "marlin/weights.h"

#pragma GCC visibility push(default)
namespace marlin {

/// The harm that each matrix of a model does alone when it is quantized.
struct Sensitivity {
  struct Matrix {
    std::string name;  ///< The tensor's; a stack of experts counts as one matrix.
    int64_t experts = 1;
    int64_t k = 0;
    int64_t n = 0;
    /// By format: KL(original || model with this matrix quantized by kMse), the mean over the
    /// tokens, in nats.
    std::vector<double> kl;

    friend bool operator==(const Matrix&, const Matrix&) = default;
  };
  std::string model_type;  ///< "qwen3_moe"
  /// Hexadecimal digits that identify the model's files and the text.
  std::string identity;
  int64_t tokens = 0;
  std::vector<FormatChoice> formats;
  std::vector<Matrix> matrices;  ///< In the order of the layers.

  /// {"model_type", "identity", "tokens", "formats": [CHOICE...], "matrices": [{"name", "experts",
  /// "k", "n", "kl": [...]}]}.
  std::string ToJson() const;
  /// Errors: kMalformedFile naming `file` and the key that is missing or has a wrong value.
  static Result<Sensitivity> FromJson(std::string_view text, const std::string& file);
  /// Errors: kIo, and as FromJson.
  static Result<Sensitivity> FromFile(const std::string& path);

  friend bool operator==(const Sensitivity&, const Sensitivity&) = default;
};

/// Options of MeasureSensitivity.
struct SensitivityOptions {
  std::vector<FormatChoice> formats = {};  ///< Empty: DefaultSensitivityFormats.
  /// Bits per weight that the formats are to meet, which is checked before anything is measured; 0:
  /// any.
  double target = 0;
  /// The text, in windows of 256 tokens. tokens: 0 is 2048.
  CalibrationOptions text = {};
  /// Measurements of an interrupted run; those with the same identity, tokens and formats are not
  /// repeated.
  Sensitivity measured = {};
  /// Called after every layer with all measurements so far.
  std::function<Status(const Sensitivity&)> save = {};
  std::function<void(int64_t done, int64_t total)> progress = {};  ///< In matrices times formats.
};

/// int2/g64/frac, nf3/g64, nf4/g64, s8/g64: 2.5 to 8.25 bits per weight.
std::vector<FormatChoice> DefaultSensitivityFormats();

/// Quantizes every attention, MLP and expert matrix of an unquantized model alone, in every format,
/// and measures how far the model's predictions move. Takes one pass over the text per matrix and
/// format, from the matrix's layer to the end. Memory: all of the model, 4 bytes per token and word
/// of the vocabulary, and per token, layer and hidden feature. The result depends on the kind of
/// device, not on the number of threads. Errors: as Model::Open and Quantize;
/// kInvalidArgument for a choice that is not quantized, formats given twice, a target that they do
/// not meet, a token out of range, a text shorter than 2 tokens.
Result<Sensitivity> MeasureSensitivity(const std::string& source, const Device& device,
                                       const SensitivityOptions& options = {});

/// The size of codes, scales and zeros, as bits per weight count it: StoredBytes without the
/// codebook, of which a matrix of any size has one of at most 64 bytes.
int64_t CodeAndScaleBytes(const WeightsSpec& spec);

/// The bits per weight that matrices of these sizes have, each with the format in which it is
/// smallest. Errors: as QuantizedSpec.
Result<double> LeastBitsPerWeight(std::span<const Sensitivity::Matrix> matrices,
                                  std::span<const FormatChoice> formats);

/// Errors: kInvalidArgument for a target that is not a positive number, or less than what
/// LeastBitsPerWeight says.
Status CheckTarget(std::span<const Sensitivity::Matrix> matrices,
                   std::span<const FormatChoice> formats, double target);

/// A recipe for a number of bits.
struct FormatAssignment {
  MixedPrecisionConfig recipe;  ///< A choice for each matrix by its name; the others are kept.
  double bits_per_weight = 0;   ///< Codes, scales and zeros, over the matrices of the recipe.
  int64_t weights = 0;          ///< The elements of these matrices.
  double predicted_kl = 0;      ///< The sum of the matrices' own.
};

/// Chooses a format for each matrix so that together they have at most `target` bits per weight,
/// and the sum of their KL is smallest: steps down the convex hulls of all matrices, steepest
/// first. Ties go to the matrix that comes first. `formats`: which of the file's may be chosen;
/// empty: all. Errors: kInvalidArgument for matrices that are not among `tensors` or have another
/// size there, a format that was not measured, and, with both numbers, a target that no choice
/// meets.
Result<FormatAssignment> AssignFormats(const Sensitivity& sensitivity,
                                       std::span<const TensorShape> tensors, double target,
                                       std::span<const FormatChoice> formats = {});

}  // namespace marlin
#pragma GCC visibility pop
