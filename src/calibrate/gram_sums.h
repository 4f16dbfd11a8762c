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

/// Computes products y^T x of rows of the same tokens. Memory is kept between calls, because the
/// first touch of new memory takes longer than the products.
class GramProducts {
 public:
  /// Rows y [rows, k], and the sums [k, k] of their products. With y = x they are symmetric, and
  /// only those on and above the diagonal are complete.
  struct Term {
    const float* y;
    double* sums;
  };

  /// `pool` outlives the products.
  GramProducts(const Device& device, ThreadPool& pool) : device_(device), pool_(&pool) {}

  ThreadPool& pool() const { return *pool_; }
  /// Adds y^T x to the sums of every term, x [rows, k]. Errors: kOutOfMemory, and as Gemm.
  Status Add(const float* x, int64_t rows, int64_t k, std::span<const Term> terms);

 private:
  /// Columns of a matrix [rows, k], ready to be multiplied by.
  struct Block {
    int64_t first;
    int64_t count;
    PreparedWeights columns;
    int64_t end() const { return first + count; }
  };

  Result<std::vector<Block>> Prepare(const float* x, int64_t rows, int64_t k);
  /// Sets left_ to y^T.
  Status TransposeOnHost(const float* y, int64_t rows, int64_t k);
  Status Transpose(std::span<const Block> y, int64_t rows);
  /// Adds a term of one product; `blocks` hold the columns of x [rows, k].
  Status AddTerm(const Term& term, const float* x, std::span<const Block> blocks, int64_t rows,
                 int64_t k);
  /// Adds the first `height` rows of left_, times a block, to their columns of sums [k, k].
  Status AddProduct(const Block& right, int64_t height, int64_t rows, int64_t k, double* sums);

  Device device_;
  ThreadPool* pool_;
  DeviceBuffer left_;           ///< y^T [k, rows]: the GEMM needs contiguous rows on the left.
  DeviceBuffer product_;        ///< [height, count of a block]
  std::vector<float> on_host_;  ///< The product.
  std::vector<float> columns_;  ///< The columns of a block.
};

/// The sum of y^T x over rows x and y [rows, k] of the same tokens: with y = x the Gram matrix.
/// Products of up to 4,096 rows are summed in fp32 by the device's GEMM, these sums in fp64 on the
/// pool, in the order of the calls. The bits do not depend on the number of threads.
class GramSums {
 public:
  /// `products` outlives the sums. All rows that are added have y = x, or none.
  GramSums(GramProducts& products, int64_t k)
      : products_(&products), k_(k), sums_(static_cast<size_t>(k * k)) {}

  /// Errors: as GramProducts::Add.
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
  void Count(int64_t rows, bool symmetric);
  double SumOf(int64_t row, int64_t column) const;

  GramProducts* products_;
  int64_t k_;
  int64_t rows_ = 0;
  bool symmetric_ = true;  ///< Every y was x.
  std::vector<double> sums_;
};

}  // namespace marlin
