// Loss of 2:4 sparsity for the matrices of a model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "marlin/checkpoint.h"
#include "marlin/recipe.h"
#include "marlin/status.h"

namespace marlin::cli {

/// Sums over a matrix, or over several.
struct PruneLoss {
  int64_t weights = 0;
  int64_t zeros = 0;
  double squares = 0;
  double pruned_squares = 0;  ///< The two smaller ones of every block of four along k.

  void Add(const PruneLoss& other);
  /// |W - W'| / |W| of pruning by magnitude: 0 for a matrix that is 2:4 already.
  double RelativeError() const;
};

struct AnalyzedMatrix {
  std::string name;
  LayerClass layer_class = LayerClass::kOther;
  PruneLoss loss;
};

/// The matrices of an unquantized checkpoint that recipes quantize, in the order of the file.
/// `progress` may be empty. Errors: kInvalidArgument for a quantized checkpoint;
/// kNonFiniteInput naming a matrix with NaN or infinity.
Result<std::vector<AnalyzedMatrix>> AnalyzeSparsity(const Checkpoint& checkpoint,
                                                    const Progress& progress);

}  // namespace marlin::cli
