#include "quantize/host_cholesky.h"

#include <Eigen/Cholesky>
#include <Eigen/Core>
#include <algorithm>

#include "base/checked.h"

namespace marlin {
namespace {

using Columns = Eigen::Map<Eigen::MatrixXd>;
using Factor = Eigen::Map<const Eigen::MatrixXd>;

/// A block of columns has one result, whichever thread computes it.
constexpr int64_t kColumnsPerTask = 32;

}  // namespace

Result<bool> HostCholesky::Factorize(std::span<double> matrix, int64_t k) const {
  Columns columns(matrix.data(), k, k);
  Eigen::Ref<Eigen::MatrixXd> in_place(columns);
  return Eigen::LLT<Eigen::Ref<Eigen::MatrixXd>>(in_place).info() == Eigen::Success;
}

Status HostCholesky::Solve(std::span<const double> factor, int64_t k, std::span<double> b) const {
  const Factor matrix(factor.data(), k, k);
  const auto lower = matrix.triangularView<Eigen::Lower>();
  const int64_t count = k == 0 ? 0 : static_cast<int64_t>(b.size()) / k;
  pool_.Run(CeilDivide(count, kColumnsPerTask), [&](int64_t task, int) {
    const int64_t first = task * kColumnsPerTask;
    Columns columns(b.data() + first * k, k, std::min(kColumnsPerTask, count - first));
    lower.solveInPlace(columns);
    lower.adjoint().solveInPlace(columns);
  });
  return {};
}

}  // namespace marlin
