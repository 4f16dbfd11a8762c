#include "base/host_cholesky.h"

#include <algorithm>

#include "base/checked.h"
#include "base/eigen_cholesky.inl.h"

namespace marlin {
namespace {

/// A block of columns has one result, whichever thread computes it.
constexpr int64_t kColumnsPerTask = 32;

}  // namespace

const CholeskyFunctions kPortableCholesky = {&FactorizeByEigen, &SolveByEigen};

Result<bool> HostCholesky::Factorize(std::span<double> matrix, int64_t k) const {
  return functions_.factorize(matrix.data(), k);
}

Status HostCholesky::Solve(std::span<const double> factor, int64_t k, std::span<double> b) const {
  const int64_t count = k == 0 ? 0 : static_cast<int64_t>(b.size()) / k;
  pool_.Run(CeilDivide(count, kColumnsPerTask), [&](int64_t task, int) {
    const int64_t first = task * kColumnsPerTask;
    const int64_t columns = std::min(kColumnsPerTask, count - first);
    functions_.solve(factor.data(), k, b.data() + first * k, columns);
  });
  return {};
}

}  // namespace marlin
