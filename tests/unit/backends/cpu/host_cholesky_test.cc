#include "base/host_cholesky.h"

#include <gtest/gtest.h>

#include <vector>

#include "../../cholesky_problem.h"
#include "backends/cpu/runtime/cpu_cholesky.h"
#include "backends/cpu/runtime/cpu_features.h"
#include "base/thread_pool.h"

namespace marlin::host_cholesky_test {
namespace {

/// The functions of the levels that this machine can run.
std::vector<CholeskyFunctions> AllFunctions() {
  std::vector<CholeskyFunctions> all = {kPortableCholesky};
#if defined(__x86_64__)
  if (cpu::GetCpuFeatures().avx2) all.push_back(cpu::avx2::kCholesky);
#endif
  return all;
}

TEST(HostCholesky, FactorizesAndSolves) {
  ThreadPool pool(2);
  for (const CholeskyFunctions& functions : AllFunctions()) {
    for (const int64_t k : {1, 7, 96, 300}) ExpectFactorizes(HostCholesky(pool, functions), k);
  }
}

TEST(HostCholesky, TellsMatricesThatAreNotPositiveDefinite) {
  ThreadPool pool(1);
  for (const CholeskyFunctions& functions : AllFunctions()) {
    ExpectTellsIndefinite(HostCholesky(pool, functions));
  }
}

TEST(HostCholesky, TheSameBitsWithAnyNumberOfThreads) {
  const CholeskyProblem problem(130);
  for (const CholeskyFunctions& functions : AllFunctions()) {
    const auto solve = [&](int threads) {
      ThreadPool pool(threads);
      const HostCholesky cholesky(pool, functions);
      std::vector<double> factor = problem.matrix;
      EXPECT_TRUE(*cholesky.Factorize(factor, problem.k));
      std::vector<double> x = problem.b;
      EXPECT_TRUE(cholesky.Solve(factor, problem.k, x).ok());
      return x;
    };
    const std::vector<double> one = solve(1);
    EXPECT_EQ(solve(2), one);
    EXPECT_EQ(solve(5), one);
  }
}

}  // namespace
}  // namespace marlin::host_cholesky_test
