#include "quantize/layer_inputs.h"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>

#include "base/checked.h"
#include "base/macros.h"

namespace marlin {
namespace {

/// A row-major matrix [k, k].
struct Square {
  std::span<const double> elements;
  int64_t k;

  double operator()(int64_t row, int64_t column) const {
    return elements[static_cast<size_t>(row * k + column)];
  }
};

constexpr double kDamping = 0.01;
constexpr double kCorrectionDamping = 0.02;
constexpr double kMostDamping = 0.1;
constexpr double kCorrectionStrength = 0.5;
constexpr int64_t kRowsPerTask = 32;

/// Runs body(row) for all rows of a matrix.
template <typename Body>
void ForRows(ThreadPool& pool, int64_t rows, const Body& body) {
  pool.Run(CeilDivide(rows, kRowsPerTask), [&](int64_t task, int) {
    const int64_t end = std::min(rows, (task + 1) * kRowsPerTask);
    for (int64_t row = task * kRowsPerTask; row < end; ++row) body(row);
  });
}

double MeanDiagonal(const Square& gram) {
  double sum = 0;
  for (int64_t i = 0; i < gram.k; ++i) sum += gram(i, i);
  return sum / static_cast<double>(gram.k);
}

Status NotFactorized(int64_t k) {
  return {Code::kUnsupported,
          fmt::format("the inputs' Gram matrix [{}, {}] is not positive definite", k, k)};
}

/// A factor, and the damping with which it could be computed.
struct Factor {
  std::vector<double> lower;  ///< Column-major.
  double damping = 0;
};

/// Factorizes a symmetric matrix with the first damping, from `damping` up, with which that is
/// possible.
Result<Factor> Factorize(const Cholesky& cholesky, std::span<const double> gram, int64_t k,
                         double mean, double damping) {
  if (!(mean > 0.0)) return Status(Code::kUnsupported, "all inputs of the layer are zero");
  Factor factor;
  for (factor.damping = damping; factor.damping <= kMostDamping; factor.damping *= 3) {
    factor.lower.assign(gram.begin(), gram.end());
    for (int64_t i = 0; i < k; ++i) {
      factor.lower[static_cast<size_t>(i * k + i)] += factor.damping * mean;
    }
    MARLIN_ASSIGN_OR_RETURN(const bool definite, cholesky.Factorize(factor.lower, k));
    if (definite) return factor;
  }
  return NotFactorized(k);
}

std::vector<int32_t> DecreasingOrder(const Square& gram) {
  std::vector<int32_t> order(static_cast<size_t>(gram.k));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&gram](int32_t a, int32_t b) { return gram(a, a) > gram(b, b); });
  return order;
}

}  // namespace

std::vector<float> DiagonalOf(const InputCurvature& curvature) {
  std::vector<float> diagonal(static_cast<size_t>(curvature.k));
  for (size_t i = 0; i < diagonal.size(); ++i) {
    diagonal[i] = curvature.hessian[i * diagonal.size() + i];
  }
  return diagonal;
}

Result<InputCurvature> MakeCurvature(ThreadPool& pool, const Cholesky& cholesky,
                                     std::span<const double> gram, int64_t k) {
  const Square h{gram, k};
  InputCurvature curvature;
  curvature.k = k;
  curvature.order = DecreasingOrder(h);
  const std::vector<int32_t>& order = curvature.order;
  // The lower factor of H in reverse order is the upper one in order.
  std::vector<double> reversed(gram.size());
  ForRows(pool, k, [&](int64_t i) {
    for (int64_t j = 0; j < k; ++j) {
      reversed[static_cast<size_t>(i * k + j)] =
          h(order[static_cast<size_t>(k - 1 - i)], order[static_cast<size_t>(k - 1 - j)]);
    }
  });
  const double mean = MeanDiagonal(h);
  MARLIN_ASSIGN_OR_RETURN(const Factor factor, Factorize(cholesky, reversed, k, mean, kDamping));
  curvature.hessian.resize(gram.size());
  curvature.feedback.resize(gram.size());
  ForRows(pool, k, [&](int64_t i) {
    float* const hessian = curvature.hessian.data() + i * k;
    float* const feedback = curvature.feedback.data() + i * k;
    for (int64_t j = 0; j < k; ++j) hessian[j] = static_cast<float>(h(i, j));
    hessian[i] = static_cast<float>(h(i, i) + factor.damping * mean);
    const double* const column = factor.lower.data() + (k - 1 - i) * k;
    for (int64_t j = 0; j < i; ++j) {
      feedback[j] = static_cast<float>(column[k - 1 - j] / column[k - 1 - i]);
    }
  });
  return curvature;
}

Result<InputCorrection> MakeCorrection(ThreadPool& pool, const Cholesky& cholesky,
                                       std::span<const double> gram, std::span<const double> cross,
                                       int64_t k) {
  const Square h{gram, k};
  const Square c{cross, k};
  MARLIN_ASSIGN_OR_RETURN(const Factor factor,
                          Factorize(cholesky, gram, k, MeanDiagonal(h), kCorrectionDamping));
  // shift = (H + lambda I)^-1 (C - H)^T; column i of the right side is row i of C - H.
  std::vector<double> solved(gram.size());
  ForRows(pool, k, [&](int64_t i) {
    for (int64_t j = 0; j < k; ++j) solved[static_cast<size_t>(i * k + j)] = c(i, j) - h(i, j);
  });
  MARLIN_RETURN_IF_ERROR(cholesky.Solve(factor.lower, k, solved));
  InputCorrection correction;
  correction.k = k;
  correction.shift.resize(gram.size());
  ForRows(pool, k, [&](int64_t row) {
    for (int64_t i = 0; i < k; ++i) {
      correction.shift[static_cast<size_t>(row * k + i)] =
          static_cast<float>(kCorrectionStrength * solved[static_cast<size_t>(i * k + row)]);
    }
  });
  return correction;
}

}  // namespace marlin
