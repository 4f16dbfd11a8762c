// The data of a case: weights, activations and epilogue operands, and what the answer must be.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "case.h"
#include "guarded_buffer.h"
#include "marlin/weights.h"
#include "reference/gemm.h"

namespace marlin::conformance {

/// Weights straight from random codes and scales; they own their memory.
QuantizedWeights MakeWeights(const Case& c);

/// Everything of a case that does not depend on the kernel.
struct Problem {
  Case c;
  QuantizedWeights weights;
  int64_t expert = 0;
  GuardedBuffer a_memory;
  GuardedBuffer bias_memory;
  GuardedBuffer row_weight_memory;
  TensorView a;  ///< [m, k]
  reference::Epilogue epilogue;

  reference::DenseWeights dense;
  reference::Product product;
  std::vector<double> expected;  ///< [m, out_n], before rounding to the output type.

  /// Lattice data only: empty, or which condition of exactness the data breaks.
  std::string broken_precondition;
  /// Lattice data only: every weight is a bf16 number.
  bool weights_fit_bf16 = false;

  int64_t out_n() const { return c.gated ? c.n / 2 : c.n; }
};

/// Builds data and reference. Errors: those of the reference.
Result<std::unique_ptr<Problem>> MakeProblem(const Case& c);

}  // namespace marlin::conformance
