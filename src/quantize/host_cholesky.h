// Cholesky factorizations on CPU threads, by Eigen.
#pragma once

#include "base/cholesky.h"
#include "base/thread_pool.h"

namespace marlin {

/// Factorizes on one thread, and solves on all of the pool, which outlives it; the result does not
/// depend on their number.
class HostCholesky final : public Cholesky {
 public:
  explicit HostCholesky(ThreadPool& pool) : pool_(pool) {}

  Result<bool> Factorize(std::span<double> matrix, int64_t k) const override;
  Status Solve(std::span<const double> factor, int64_t k, std::span<double> b) const override;

 private:
  ThreadPool& pool_;
};

}  // namespace marlin
