// Batches in the simulator: one launch for all matrices, with the bits of a launch for each.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backends/metal/gemm/batch_launches.h"
#include "backends/metal/gemm/row_parts.h"
#include "backends/metal/kernels/gemm/batch_parameters.h"
#include "backends/metal/metal_backend.h"
#include "backends/metal/runtime/simulated_driver.h"
#include "marlin/gemm.h"
#include "marlin/quantize.h"
#include "ops/device/device.h"

namespace marlin::metal::simulated_batch_test {
namespace {

using ::testing::ElementsAre;

struct Problem {
  int64_t m = 1;
  int64_t k = 96;
  int64_t n = 40;
  QuantizeOptions format = {.format = Format::kU4, .group_size = 32};
  bool gated = false;
  bool bias = false;  ///< One for each matrix; without, one for all.
  std::string kernel = {};
  int64_t matrices = 3;
};

class SimulatedBatch : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto driver = OpenSimulatedDriver(&launches_);
    opened_ = driver.status();
    if (!opened_.ok()) return;
    device_ = Internals::Make<Device>(
        std::make_shared<Device::Impl>(MakeMetalBackend(std::move(*driver))));
  }
  static void TearDownTestSuite() { device_.reset(); }
  void SetUp() override {
    if (!opened_.ok()) GTEST_SKIP() << opened_.message();
  }

  std::vector<float> Random(int64_t count, float largest) {
    std::uniform_real_distribution<float> uniform(-largest, largest);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = uniform(random_);
    return values;
  }

  /// The functions that a batch launches. Its results have the bits of single products, whose
  /// operands are where the batch has them: rows of a, and of the output, of one matrix after
  /// those of another.
  std::vector<std::string> Launched(const Problem& problem) {
    const auto [m, k, n, batch] = std::tuple(problem.m, problem.k, problem.n, problem.matrices);
    std::vector<float> dense;
    // Matrices of other magnitudes have other scales, and global scales.
    for (int64_t b = 0; b < batch; ++b) {
      for (const float value : Random(k * n, static_cast<float>(1 + b))) dense.push_back(value);
    }
    const auto quantized = Quantize({dense.data(), DType::kF32, {batch, k, n}}, problem.format);
    EXPECT_TRUE(quantized.ok()) << quantized.status().message();
    const PreparedWeights weights = *Prepare(*quantized, *device_);
    const int64_t columns = problem.gated ? n / 2 : n;
    const std::vector<float> a = Random(batch * m * k, 1.0F);
    const std::vector<float> bias = Random(batch * n, 2.0F);
    const std::vector<float> row_weight = Random(batch * m, 1.0F);
    std::vector<float> together(static_cast<size_t>(batch * m * columns), -1.0F);
    std::vector<float> apart = together;
    GemmOptions options;
    options.kernel = problem.kernel;
    options.activation = Activation::kSilu;
    options.gated = problem.gated;
    options.bias = {bias.data(), DType::kF32, problem.bias ? Shape{batch, n} : Shape{n}};
    options.row_weight = {row_weight.data(), DType::kF32, {batch, m}};
    launches_.clear();
    const Status status = BatchedGemm(
        *device_, {a.data(), DType::kF32, {batch, m, k}, {k, batch * k, 1}}, weights,
        {together.data(), DType::kF32, {batch, m, columns}, {columns, batch * columns, 1}},
        options);
    EXPECT_TRUE(status.ok()) << status.message();
    std::vector<std::string> functions;
    for (const SimulatedLaunch& launch : launches_) functions.push_back(launch.function);
    for (int64_t b = 0; b < batch; ++b) {
      options.expert = b;
      options.bias = {bias.data() + (problem.bias ? b * n : 0), DType::kF32, {n}};
      options.row_weight = {row_weight.data() + b * m, DType::kF32, {m}};
      const Status one = Gemm(
          *device_, {a.data() + b * k, DType::kF32, {m, k}, {batch * k, 1}}, weights,
          {apart.data() + b * columns, DType::kF32, {m, columns}, {batch * columns, 1}}, options);
      EXPECT_TRUE(one.ok()) << one.message();
    }
    EXPECT_EQ(together, apart);
    return functions;
  }

  std::mt19937 random_{7};
  inline static Status opened_;
  inline static std::vector<SimulatedLaunch> launches_;
  inline static std::optional<Device> device_;
};

TEST_F(SimulatedBatch, IsOneLaunch) {
  EXPECT_THAT(Launched({}), ElementsAre("marlin_batched_gemv_1"));
  EXPECT_EQ(launches_.front().counters.threadgroups, 3 * 40 / 8);
  EXPECT_THAT(Launched({.m = 3, .bias = true}), ElementsAre("marlin_batched_gemv_4"));
  EXPECT_THAT(Launched({.m = 5, .n = 32, .gated = true}), ElementsAre("marlin_batched_gemv_8"));
  EXPECT_THAT(Launched({.m = 5, .kernel = "marlin_gemm_fused_u4"}),
              ElementsAre("marlin_batched_gemm_direct_64x64"));
  EXPECT_THAT(Launched({.m = 5, .bias = true, .kernel = "marlin_gemm_staged"}),
              ElementsAre("marlin_batched_gemm_staged_2xf32"));
}

TEST_F(SimulatedBatch, ReducesPartialsInASecondOne) {
  EXPECT_THAT(Launched({.m = 20, .k = 700, .kernel = "marlin_gemm_split_k"}),
              ElementsAre("marlin_batched_gemm_direct_32x64", "marlin_batched_finish"));
  EXPECT_THAT(Launched({.m = 3, .k = 700, .bias = true, .kernel = "marlin_gemm_split_k"}),
              ElementsAre("marlin_batched_gemm_direct_16x64", "marlin_batched_finish"));
  // Gate and up are no whole strips.
  EXPECT_THAT(Launched({.m = 2, .n = 36, .gated = true, .bias = true}),
              ElementsAre("marlin_batched_gemv_2", "marlin_batched_finish"));
}

TEST_F(SimulatedBatch, HasTheScalesOfEveryMatrix) {
  const QuantizeOptions formats[] = {
      {.format = Format::kFp4E2M1, .group_size = 16, .scale_type = ScaleType::kE4M3},
      {.format = Format::kS8, .group_size = 0},
      {.format = Format::kNf3, .group_size = 32},
      {.format = Format::kBf16},
  };
  for (const QuantizeOptions& format : formats) {
    EXPECT_THAT(Launched({.format = format}), ElementsAre("marlin_batched_gemv_1"));
    EXPECT_THAT(Launched({.m = 4, .format = format, .kernel = "marlin_gemm_staged"}),
                ElementsAre("marlin_batched_gemm_staged_2xf32"));
  }
}

TEST_F(SimulatedBatch, OfManyMatricesIsSeveralLaunches) {
  EXPECT_THAT(Launched({.matrices = 18}),
              ElementsAre("marlin_batched_gemv_1", "marlin_batched_gemv_1"));
  // The last matrix is alone.
  EXPECT_THAT(Launched({.matrices = 17}), ElementsAre("marlin_batched_gemv_1", "marlin_gemv_1"));
}

TEST(MostMatricesOf, LimitsTheLengthOfACommandBuffer) {
  LaunchPlan plan;
  plan.function = "marlin_gemv_1";
  GemmDesc desc;
  desc.m = 1;
  desc.k = 1 << 20;
  desc.n = 1 << 10;
  EXPECT_EQ(MostMatricesOf(plan, desc), kernels::kMostMatrices);
  desc.n = 1 << 18;
  EXPECT_EQ(2 * desc.n * desc.k * 4, kMostOperationsOfPart);
  EXPECT_EQ(MostMatricesOf(plan, desc), 4);
  desc.n = 1 << 22;
  EXPECT_EQ(MostMatricesOf(plan, desc), 1);
  desc.n = 1;
  plan.zeroes = true;
  EXPECT_EQ(MostMatricesOf(plan, desc), 1);
}

}  // namespace
}  // namespace marlin::metal::simulated_batch_test
