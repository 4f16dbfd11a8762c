// Error bounds of the sums of a GEMM, from the error model that a kernel declares.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/gemm/kernel_desc.h"
#include "reference/gemm.h"

namespace marlin::conformance {

struct SumError {
  double hard = 0;   ///< The declared bound.
  double tight = 0;  ///< The reach of independent rounding errors: 6 standard deviations.
};

/// The operands of a GEMM, and its sums; what they refer to outlives SumErrors.
struct SumOperands {
  std::span<const double> a;  ///< [m, k]; only the magnitudes matter.
  const reference::DenseWeights& weights;
  const reference::Product& product;
  bool allow_bf16_activations = false;  ///< Lets bf16 kernels round A once.
};

/// The errors of the sums of one kernel, before its epilogue.
class SumErrors {
 public:
  SumErrors(const SumOperands& operands, const ErrorModel& model, Grade grade);

  SumError At(int64_t m, int64_t n) const;

 private:
  void AddSteps(const ErrorModel& model);
  SumError StepError(int64_t m, int64_t n) const;

  SumOperands operands_;
  double gamma_ = 0;
  double gamma_tight_ = 0;
  double unit_ = 0;
  std::vector<double> underflow_;  ///< [m]
  // Activations quantized in blocks of k; no blocks: they are not.
  int64_t block_ = 0;
  int64_t blocks_ = 0;
  std::vector<double> block_sums_;     ///< [blocks, n] of |w|
  std::vector<double> block_squares_;  ///< [blocks, n] of w^2
  std::vector<double> steps_;          ///< [m, blocks]
};

}  // namespace marlin::conformance
