// The data of a case: weights, activations and epilogue operands, and what the answer must be.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "case.h"
#include "guarded_buffer.h"
#include "marlin/device.h"
#include "marlin/weights.h"
#include "reference/gemm.h"

namespace marlin::conformance {

/// Weights straight from random codes and scales; they own their memory.
QuantizedWeights MakeWeights(const Case& c);

/// Lattice data are dense up to this k; longer rows are mostly zero, or their sums would not be
/// exact.
inline constexpr int64_t kMaxDenseLatticeK = 420;

/// The period of a periodic problem along m and, in each half of a gated one, along n: primes, so
/// that no tile or power of two hides a wrong index.
inline constexpr int64_t kPeriodRows = 37;
inline constexpr int64_t kPeriodColumns = 251;

/// Everything of a case that does not depend on the kernel.
struct Problem {
  Case c;         ///< Of a periodic case: one period.
  int64_t m = 0;  ///< Rows to multiply: those of c, again and again.
  int64_t n = 0;  ///< Columns of the weights, likewise.
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

  /// The weights, of a periodic case all of them, on a device; prepared once for all rows that want
  /// them in the same layout. Not thread-safe.
  Result<PreparedWeights> PreparedFor(const Device& device,
                                      const PrepareOptions& options = {}) const;

 private:
  mutable std::shared_ptr<Device::Impl> prepared_device_;
  mutable PrepareOptions prepared_options_;
  mutable PreparedWeights prepared_;
};

/// Weights of n columns in `parts` equal parts, each of which repeats its part of `weights`.
QuantizedWeights RepeatColumns(const QuantizedWeights& weights, int64_t n, int parts);

/// Elements [1, rows, columns], each row repeated likewise up to n columns; `offset` as for the
/// buffer.
GuardedBuffer RepeatRows(const TensorView& view, int64_t n, int parts, int64_t offset = 0);

/// Builds data and reference. Errors: those of the reference.
Result<std::unique_ptr<Problem>> MakeProblem(const Case& c);

}  // namespace marlin::conformance
