// Cholesky factorizations on AVX2 and FMA.
#define Eigen eigen_of_avx2
#include "base/eigen_cholesky.inl.h"
// Separate block: Eigen's namespace has its name from here on.
#include "backends/cpu/runtime/cpu_cholesky.h"

namespace marlin::cpu::avx2 {

const CholeskyFunctions kCholesky = {&FactorizeByEigen, &SolveByEigen};

}  // namespace marlin::cpu::avx2
