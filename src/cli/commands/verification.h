// Measures the error of a quantized checkpoint against its source.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "marlin/checkpoint.h"
#include "marlin/recipe.h"
#include "marlin/status.h"

namespace marlin::cli {

/// Sums over weights w and their errors e = w' - w, from which all metrics follow.
struct ErrorSums {
  double weight_squares = 0;
  double error_squares = 0;
  double max_error = 0;
  int64_t parameters = 0;

  void Add(const ErrorSums& other);
  /// Frobenius norm of the error relative to the weights; 0 without errors.
  double RelativeError() const;
  /// Signal to quantization noise: 10 log10(weights / errors) of squares; infinite without errors.
  double SqnrDb() const;
};

struct TensorComparison {
  std::string name;  ///< The source's name; "*" stands for the number of stacked experts.
  std::string format;
  LayerClass layer_class = LayerClass::kOther;
  ErrorSums errors;
};

struct Comparison {
  std::vector<TensorComparison> tensors;
  std::array<ErrorSums, kLayerClassCount> classes;
  ErrorSums total;
  /// The tensor with the largest relative error; null for an empty checkpoint.
  const TensorComparison* Worst() const;
};

/// Compares every tensor of a quantized checkpoint with its source. Errors: kInvalidArgument when
/// `quantized` is not quantized; kUnsupported when its method scaled tensors (awq); kMalformedFile
/// naming a tensor that is missing in either or whose shapes differ, with both shapes.
Result<Comparison> CompareCheckpoints(const Checkpoint& quantized, const Checkpoint& source,
                                      const Progress& progress = {});

}  // namespace marlin::cli
