#include "quantize/host_cholesky.h"

#include <gtest/gtest.h>

#include <vector>

#include "../cholesky_problem.h"
#include "base/thread_pool.h"

namespace marlin {
namespace {

TEST(HostCholesky, FactorizesAndSolves) {
  ThreadPool pool(2);
  for (const int64_t k : {1, 7, 96, 300}) ExpectFactorizes(HostCholesky(pool), k);
}

TEST(HostCholesky, TellsMatricesThatAreNotPositiveDefinite) {
  ThreadPool pool(1);
  ExpectTellsIndefinite(HostCholesky(pool));
}

TEST(HostCholesky, TheSameBitsWithAnyNumberOfThreads) {
  const CholeskyProblem problem(130);
  const auto solve = [&](int threads) {
    ThreadPool pool(threads);
    const HostCholesky cholesky(pool);
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

}  // namespace
}  // namespace marlin
