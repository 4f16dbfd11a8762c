// One call of Gemm on poisoned, guarded memory, and what it left there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "guarded_buffer.h"
#include "marlin/gemm.h"
#include "problem.h"

namespace marlin::conformance {

/// The output of a call and the state of the memory around it.
class ProductRun {
 public:
  double Output(int64_t m, int64_t n) const;
  /// The stored bits of an output.
  uint32_t Bits(int64_t m, int64_t n) const;
  /// A hash of all outputs.
  uint64_t Hash() const;
  /// Empty, or what was written that must not be.
  std::string Damage() const;
  const std::string& kernel() const { return kernel_; }

 private:
  friend Result<ProductRun> RunProductRows(const Device&, const PreparedWeights&, const Problem&,
                                           GemmOptions, const std::vector<int64_t>&);
  int64_t rows_ = 0;
  int64_t columns_ = 0;
  int64_t stride_ = 0;
  DType type_ = DType::kF32;
  GuardedBuffer output_;
  GuardedBuffer workspace_;
  std::string kernel_;
  bool inputs_changed_ = false;
};

/// The options that a case asks for, kernel not yet forced.
GemmOptions ProductOptions(const Problem& problem);

/// Plans and runs the product of a problem in a workspace of exactly the planned size. Errors:
/// those of PlanGemm and Gemm.
Result<ProductRun> RunProduct(const Device& device, const PreparedWeights& prepared,
                              const Problem& problem, const GemmOptions& options);

/// The same on a choice of the rows of A, copied one after the other.
Result<ProductRun> RunProductRows(const Device& device, const PreparedWeights& prepared,
                                  const Problem& problem, GemmOptions options,
                                  const std::vector<int64_t>& rows);

}  // namespace marlin::conformance
