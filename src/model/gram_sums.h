// Sums of products of a layer's inputs over tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "marlin/device.h"
#include "marlin/status.h"

namespace marlin {

/// The sum of y^T x over rows x and y [rows, k] of the same tokens: with y = x the Gram matrix.
/// Products of up to 512 rows, or of up to 4,096 where sums would cross a bus, are summed in fp32
/// by the device's GEMM, these sums in fp64 on `pool`, in the order of the calls. The bits do not
/// depend on the number of threads.
class GramSums {
 public:
  /// `pool` outlives the sums.
  GramSums(const Device& device, ThreadPool& pool, int64_t k)
      : device_(device), pool_(&pool), k_(k), sums_(static_cast<size_t>(k * k)) {}

  /// Errors: kOutOfMemory and those of Gemm.
  Status Add(const float* y, const float* x, int64_t rows);

  int64_t k() const { return k_; }
  int64_t rows() const { return rows_; }
  /// The mean over the rows; zero without any.
  std::vector<double> Mean() const;
  /// (rows * mean + weight * other) / (rows + weight).
  std::vector<double> MeanWith(const std::vector<double>& other, double weight) const;

 private:
  Device device_;
  ThreadPool* pool_;
  int64_t k_;
  int64_t rows_ = 0;
  std::vector<double> sums_;
};

}  // namespace marlin
