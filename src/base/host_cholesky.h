// Cholesky factorizations on CPU threads, by Eigen.
#pragma once

#include <cstdint>

#include "base/cholesky.h"
#include "base/thread_pool.h"

namespace marlin {

/// Eigen's functions, compiled for one instruction set (eigen_cholesky.inl.h). Matrices are
/// column-major.
struct CholeskyFunctions {
  /// Cholesky::Factorize of matrix [k, k].
  bool (*factorize)(double* matrix, int64_t k);
  /// Cholesky::Solve of b [k, columns].
  void (*solve)(const double* factor, int64_t k, double* b, int64_t columns);
};

/// For every processor of this architecture.
extern const CholeskyFunctions kPortableCholesky;

/// Factorizes on one thread, and solves on all of the pool, which outlives it; the result does not
/// depend on their number.
class HostCholesky final : public Cholesky {
 public:
  explicit HostCholesky(ThreadPool& pool, const CholeskyFunctions& functions = kPortableCholesky)
      : pool_(pool), functions_(functions) {}

  Result<bool> Factorize(std::span<double> matrix, int64_t k) const override;
  Status Solve(std::span<const double> factor, int64_t k, std::span<double> b) const override;

 private:
  ThreadPool& pool_;
  CholeskyFunctions functions_;
};

}  // namespace marlin
