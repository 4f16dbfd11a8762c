// Factorizations by cuSOLVER.
#include <gtest/gtest.h>

#include <memory>
#include <utility>
#include <vector>

#include "../../cholesky_problem.h"
#include "marlin/device.h"
#include "ops/device/device.h"
#include "plan/gemm/backend.h"
namespace marlin::device_cholesky_gpu_test {
namespace {

class DeviceCholesky : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto device = Device::Open("cuda");
    ASSERT_TRUE(device.ok()) << device.status().message();
    auto made = Internals::Impl(*device).backend().MakeCholesky();
    if (!made.ok() && made.status().code() == Code::kUnsupported) {
      GTEST_SKIP() << made.status().message();
    }
    ASSERT_TRUE(made.ok()) << made.status().message();
    cholesky_ = *std::move(made);
  }
  std::unique_ptr<Cholesky> cholesky_;
};

TEST_F(DeviceCholesky, FactorizesAndSolves) {
  for (const int64_t k : {1, 7, 96, 300}) ExpectFactorizes(*cholesky_, k);
}

TEST_F(DeviceCholesky, TellsMatricesThatAreNotPositiveDefinite) {
  ExpectTellsIndefinite(*cholesky_);
}

TEST_F(DeviceCholesky, TheSameBitsEveryTime) {
  const CholeskyProblem problem(700);
  std::vector<std::vector<double>> results;
  for (int run = 0; run < 3; ++run) {
    std::vector<double> factor = problem.matrix;
    ASSERT_TRUE(*cholesky_->Factorize(factor, problem.k));
    results.push_back(problem.b);
    ASSERT_TRUE(cholesky_->Solve(factor, problem.k, results.back()).ok());
  }
  EXPECT_EQ(results[1], results[0]);
  EXPECT_EQ(results[2], results[0]);
}

TEST_F(DeviceCholesky, RefusesMatricesThatTheLibraryCannotIndex) {
  std::vector<double> none;
  const Result<bool> large = cholesky_->Factorize(none, 50000);
  ASSERT_FALSE(large.ok());
  EXPECT_EQ(large.status().code(), Code::kUnsupported);
}

}  // namespace
}  // namespace marlin::device_cholesky_gpu_test
