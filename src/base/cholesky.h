// Cholesky factorizations, by a library of the host or of a device.
#pragma once

#include <cstdint>
#include <span>

#include "marlin/status.h"

namespace marlin {

/// Factorizes symmetric matrices in host memory. All matrices are column-major. Thread-safe; the
/// same input always has the same result.
class Cholesky {
 public:
  virtual ~Cholesky() = default;

  /// Replaces the lower triangle of `matrix` [k, k] by L, with matrix = L L^T; what is above it
  /// afterwards is arbitrary. False if the matrix is not positive definite. Errors: kOutOfMemory,
  /// kDeviceLost, kInternal with the library's status.
  virtual Result<bool> Factorize(std::span<double> matrix, int64_t k) const = 0;

  /// Replaces b [k, any number of columns] by (L L^T)^-1 b. `factor`: of Factorize. Errors: as
  /// above.
  virtual Status Solve(std::span<const double> factor, int64_t k, std::span<double> b) const = 0;
};

}  // namespace marlin
