#include "quantize/layer_inputs.h"

#include <fmt/format.h>

#include <Eigen/Cholesky>
#include <Eigen/Core>
#include <algorithm>
#include <numeric>

#include "base/checked.h"
#include "base/macros.h"

namespace marlin {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Gram = Eigen::Map<const Matrix>;
using Factor = Eigen::LLT<Eigen::MatrixXd>;

constexpr double kDamping = 0.01;
constexpr double kCorrectionDamping = 0.02;
constexpr double kMostDamping = 0.1;
constexpr double kCorrectionStrength = 0.5;
constexpr int64_t kRowsPerTask = 32;

double MeanDiagonal(const Gram& gram) {
  return gram.diagonal().sum() / static_cast<double>(gram.rows());
}

Status NotFactorized(int64_t k) {
  return {Code::kUnsupported,
          fmt::format("the inputs' Gram matrix [{}, {}] is not positive definite", k, k)};
}

/// The first damping, from `damping` up, with which a matrix can be factorized.
Result<double> Factorize(const Eigen::MatrixXd& gram, double mean, double damping, Factor* factor) {
  if (!(mean > 0.0)) return Status(Code::kUnsupported, "all inputs of the layer are zero");
  for (; damping <= kMostDamping; damping *= 3) {
    Eigen::MatrixXd damped = gram;
    damped.diagonal().array() += damping * mean;
    factor->compute(damped);
    if (factor->info() == Eigen::Success) return damping;
  }
  return NotFactorized(gram.rows());
}

std::vector<int32_t> DecreasingOrder(const Gram& gram) {
  std::vector<int32_t> order(static_cast<size_t>(gram.rows()));
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

Result<InputCurvature> MakeCurvature(ThreadPool& pool, std::span<const double> gram, int64_t k) {
  const Gram h(gram.data(), k, k);
  InputCurvature curvature;
  curvature.k = k;
  curvature.order = DecreasingOrder(h);
  const std::vector<int32_t>& order = curvature.order;
  // The lower factor of H in reverse order is the upper one in order.
  Eigen::MatrixXd reversed(k, k);
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      reversed(i, j) =
          h(order[static_cast<size_t>(k - 1 - i)], order[static_cast<size_t>(k - 1 - j)]);
    }
  }
  Factor factor;
  const double mean = MeanDiagonal(h);
  MARLIN_ASSIGN_OR_RETURN(const double damping, Factorize(reversed, mean, kDamping, &factor));
  const auto count = static_cast<size_t>(k * k);
  curvature.hessian.resize(count);
  curvature.feedback.resize(count);
  const Eigen::MatrixXd& lower = factor.matrixLLT();
  pool.Run(CeilDivide(k, kRowsPerTask), [&](int64_t task, int) {
    const int64_t end = std::min(k, (task + 1) * kRowsPerTask);
    for (int64_t i = task * kRowsPerTask; i < end; ++i) {
      float* const hessian = curvature.hessian.data() + i * k;
      float* const feedback = curvature.feedback.data() + i * k;
      for (int64_t j = 0; j < k; ++j) hessian[j] = static_cast<float>(h(i, j));
      hessian[i] = static_cast<float>(h(i, i) + damping * mean);
      const int64_t row = k - 1 - i;
      for (int64_t j = 0; j < i; ++j) {
        feedback[j] = static_cast<float>(lower(k - 1 - j, row) / lower(row, row));
      }
    }
  });
  return curvature;
}

Result<InputCorrection> MakeCorrection(ThreadPool& pool, std::span<const double> gram,
                                       std::span<const double> cross, int64_t k) {
  const Gram h(gram.data(), k, k);
  const Gram c(cross.data(), k, k);
  Factor factor;
  MARLIN_RETURN_IF_ERROR(Factorize(h, MeanDiagonal(h), kCorrectionDamping, &factor).status());
  InputCorrection correction;
  correction.k = k;
  correction.shift.resize(static_cast<size_t>(k * k));
  // shift = (H + lambda I)^-1 (C - H)^T, by columns. A block of columns has one result, whichever
  // thread computes it.
  pool.Run(CeilDivide(k, kRowsPerTask), [&](int64_t task, int) {
    const int64_t first = task * kRowsPerTask;
    const int64_t columns = std::min(kRowsPerTask, k - first);
    Eigen::MatrixXd block =
        (c.middleRows(first, columns) - h.middleRows(first, columns)).transpose();
    factor.solveInPlace(block);
    for (int64_t row = 0; row < k; ++row) {
      for (int64_t i = 0; i < columns; ++i) {
        correction.shift[static_cast<size_t>(row * k + first + i)] =
            static_cast<float>(kCorrectionStrength * block(row, i));
      }
    }
  });
  return correction;
}

}  // namespace marlin
