// The data of a case: weights, activations, epilogue operands and the expected result.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "case.h"
#include "guarded_buffer.h"
#include "marlin/device.h"
#include "marlin/weights.h"
#include "reference/gemm.h"

namespace marlin::conformance {

/// Generates weights directly from random codes and scales; they own their memory.
QuantizedWeights MakeWeights(const Case& c);

/// Lattice data are dense up to this k; longer rows are mostly zero, since dense sums would not be
/// exact.
inline constexpr int64_t kMaxDenseLatticeK = 420;

/// The period of a periodic problem along m and along n (along each half of a GLU): primes, so that
/// no tile size or power of two masks a wrong index.
inline constexpr int64_t kPeriodRows = 37;
inline constexpr int64_t kPeriodColumns = 251;

/// The kernel-independent part of a case.
struct Problem {
  Case c;         ///< For a periodic case: one period.
  int64_t m = 0;  ///< Rows of the GEMM: the rows of c, repeated.
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

  /// Lattice data only: the violated condition of exactness, or empty.
  std::string broken_precondition;
  /// Lattice data only: bf16 represents every weight.
  bool weights_fit_bf16 = false;

  int64_t out_n() const { return c.gated ? c.n / 2 : c.n; }

  /// The weights prepared on a device (for a periodic case, all periods); cached for rows that use
  /// the same layout. Not thread-safe.
  Result<PreparedWeights> PreparedFor(const Device& device,
                                      const PrepareOptions& options = {}) const;

 private:
  mutable std::optional<Device> prepared_device_;
  mutable PrepareOptions prepared_options_;
  mutable PreparedWeights prepared_;
};

/// Returns weights of n columns in `parts` equal parts, each of which repeats its part of
/// `weights`.
QuantizedWeights RepeatColumns(const QuantizedWeights& weights, int64_t n, int parts);

/// Returns elements [1, rows, columns] with each row repeated up to n columns in the same way;
/// `offset` is passed to the buffer.
GuardedBuffer RepeatRows(const TensorView& view, int64_t n, int parts, int64_t offset = 0);

/// Builds data and reference. Errors: those of the reference.
Result<std::unique_ptr<Problem>> MakeProblem(const Case& c);

}  // namespace marlin::conformance
