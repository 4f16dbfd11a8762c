// Sums of products of a layer's inputs over tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "marlin/device.h"
#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin {

/// Computes products y^T x of rows of the same tokens, in memory that is reused from call to call:
/// most of the time of fresh memory is its first use.
class GramProducts {
 public:
  /// Rows y [rows, k], and the sums [k, k] of their products.
  struct Term {
    const float* y;
    double* sums;
  };

  /// `pool` outlives the products.
  GramProducts(const Device& device, ThreadPool& pool) : device_(device), pool_(&pool) {}

  ThreadPool& pool() const { return *pool_; }
  /// Adds y^T x to the sums of every term, x [rows, k]. Errors: kOutOfMemory and those of Gemm.
  Status Add(const float* x, int64_t rows, int64_t k, std::span<const Term> terms);

 private:
  /// Each sets left_ to y^T: in memory that the host writes, from rows on the device, or from rows
  /// that are copied there.
  Status TransposeOnHost(const float* y, int64_t rows, int64_t k);
  Status Transpose(const PreparedWeights& y, int64_t rows, int64_t k);
  Status UploadTransposed(const float* y, int64_t rows, int64_t k);
  Status AddProduct(const PreparedWeights& right, int64_t rows, int64_t k, double* sums);

  Device device_;
  ThreadPool* pool_;
  DeviceBuffer left_;     ///< y^T [k, rows], the GEMM's left operand, of which rows are contiguous.
  DeviceBuffer product_;  ///< [k, k]
  std::vector<float> on_host_;  ///< The product.
};

/// The sum of y^T x over rows x and y [rows, k] of the same tokens: with y = x the Gram matrix.
/// Products of up to 512 rows, or of up to 4,096 where sums would cross a bus, are summed in fp32
/// by the device's GEMM, these sums in fp64 on the pool, in the order of the calls. The bits do not
/// depend on the number of threads.
class GramSums {
 public:
  /// `products` outlives the sums.
  GramSums(GramProducts& products, int64_t k)
      : products_(&products), k_(k), sums_(static_cast<size_t>(k * k)) {}

  /// Errors: those of GramProducts.
  Status Add(const float* y, const float* x, int64_t rows);
  /// gram.Add(x, x, rows) and cross.Add(y, x, rows).
  static Status AddBoth(const float* y, const float* x, int64_t rows, GramSums* gram,
                        GramSums* cross);

  int64_t k() const { return k_; }
  int64_t rows() const { return rows_; }
  /// The mean over the rows; zero without any.
  std::vector<double> Mean() const;
  /// (rows * mean + weight * other) / (rows + weight).
  std::vector<double> MeanWith(const std::vector<double>& other, double weight) const;

 private:
  GramProducts* products_;
  int64_t k_;
  int64_t rows_ = 0;
  std::vector<double> sums_;
};

}  // namespace marlin
