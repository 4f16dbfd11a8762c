// Cholesky factorizations by Eigen, in the instruction set of the file that includes this. A file
// with flags of its own first gives Eigen's namespace another name: the linker keeps one copy of
// every template, which would otherwise be shared between instruction sets.
#include <Eigen/Cholesky>
#include <Eigen/Core>
#include <cstdint>

namespace marlin {

/// See CholeskyFunctions.
static bool FactorizeByEigen(double* matrix, int64_t k) {
  Eigen::Map<Eigen::MatrixXd> columns(matrix, k, k);
  Eigen::Ref<Eigen::MatrixXd> in_place(columns);
  return Eigen::LLT<Eigen::Ref<Eigen::MatrixXd>>(in_place).info() == Eigen::Success;
}

static void SolveByEigen(const double* factor, int64_t k, double* b, int64_t columns) {
  const Eigen::Map<const Eigen::MatrixXd> matrix(factor, k, k);
  const auto lower = matrix.triangularView<Eigen::Lower>();
  Eigen::Map<Eigen::MatrixXd> right(b, k, columns);
  lower.solveInPlace(right);
  lower.adjoint().solveInPlace(right);
}

}  // namespace marlin
