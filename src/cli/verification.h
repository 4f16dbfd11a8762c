// How far a quantized checkpoint is from its source.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "marlin/checkpoint.h"
#include "marlin/recipe.h"
#include "marlin/status.h"

namespace marlin::cli {

/// Sums over weights w and their errors e = w' - w, from which every figure follows.
struct ErrorSums {
  double weight_squares = 0;
  double error_squares = 0;
  double max_error = 0;
  int64_t parameters = 0;

  void Add(const ErrorSums& other);
  /// Frobenius norm of the error over that of the weights; 0 when there is no error.
  double RelativeError() const;
  /// 10 log10(weights / errors) of squares; infinite when there is no error.
  double SqnrDb() const;
};

struct TensorComparison {
  std::string name;  ///< As the source calls it; of a stack of experts "*" stands for the number.
  std::string format;
  LayerClass layer_class = LayerClass::kOther;
  ErrorSums errors;
};

struct Comparison {
  std::vector<TensorComparison> tensors;
  std::array<ErrorSums, kLayerClassCount> classes;
  ErrorSums total;
  /// The tensor of the largest relative error; null for an empty checkpoint.
  const TensorComparison* Worst() const;
};

/// Compares every tensor of a quantized checkpoint with its source. Errors: kInvalidArgument when
/// `quantized` is not quantized; kMalformedFile naming a tensor that only one of them has, or whose
/// shapes differ, with both.
Result<Comparison> CompareCheckpoints(const Checkpoint& quantized, const Checkpoint& source,
                                      const Progress& progress = {});

}  // namespace marlin::cli
