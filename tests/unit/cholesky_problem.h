// Problems for implementations of Cholesky, and what is expected of them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "base/cholesky.h"

namespace marlin {

/// A positive definite matrix, and right sides, 70 columns.
struct CholeskyProblem {
  explicit CholeskyProblem(int64_t size) : k(size) {
    std::mt19937 random(static_cast<unsigned>(size));
    std::normal_distribution<double> normal;
    const auto count = static_cast<size_t>(k * k);
    std::vector<double> rows(count);
    for (double& x : rows) x = normal(random);
    matrix.resize(count);
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j < k; ++j) {
        double sum = i == j ? 1.0 : 0.0;
        for (int64_t t = 0; t < k; ++t) sum += rows[At(i, t)] * rows[At(j, t)];
        matrix[At(i, j)] = sum;
      }
    }
    b.resize(static_cast<size_t>(k * 70));
    for (double& x : b) x = normal(random);
  }

  size_t At(int64_t row, int64_t column) const { return static_cast<size_t>(column * k + row); }

  int64_t k;
  std::vector<double> matrix;
  std::vector<double> b;
};

inline void ExpectFactorizes(const Cholesky& cholesky, int64_t k) {
  const CholeskyProblem problem(k);
  std::vector<double> factor = problem.matrix;
  const Result<bool> definite = cholesky.Factorize(factor, k);
  ASSERT_TRUE(definite.ok()) << definite.status().message();
  ASSERT_TRUE(*definite);
  const double bound = 1e-12 * static_cast<double>(k) * (1.0 + problem.matrix[0]);
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      double sum = 0;
      for (int64_t t = 0; t <= j; ++t) sum += factor[problem.At(i, t)] * factor[problem.At(j, t)];
      ASSERT_NEAR(sum, problem.matrix[problem.At(i, j)], bound) << k << ": " << i << " " << j;
    }
  }
  std::vector<double> x = problem.b;
  ASSERT_TRUE(cholesky.Solve(factor, k, x).ok());
  for (size_t first = 0; first < x.size(); first += static_cast<size_t>(k)) {
    for (int64_t i = 0; i < k; ++i) {
      double sum = 0;
      for (int64_t t = 0; t < k; ++t) {
        sum += problem.matrix[problem.At(i, t)] * x[first + static_cast<size_t>(t)];
      }
      ASSERT_NEAR(sum, problem.b[first + static_cast<size_t>(i)], 1e-8) << k << ": " << i;
    }
  }
}

inline void ExpectTellsIndefinite(const Cholesky& cholesky) {
  std::vector<double> matrix = {1, 2, 2, 1};
  const Result<bool> definite = cholesky.Factorize(matrix, 2);
  ASSERT_TRUE(definite.ok()) << definite.status().message();
  EXPECT_FALSE(*definite);
}

}  // namespace marlin
