// BatchedGemm: the bits of one Gemm per matrix, and its own errors.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "device_test.h"
#include "marlin/gemm.h"
#include "marlin/quantize.h"

namespace marlin::batched_gemm_test {
namespace {

constexpr int64_t kBatch = 3;
constexpr int64_t kM = 5;
constexpr int64_t kK = 96;
constexpr int64_t kN = 48;

std::vector<float> Ramp(int64_t count, int modulus) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] =
        static_cast<float>(static_cast<int>(i * 37 % static_cast<size_t>(modulus)) - modulus / 2) /
        16;
  }
  return values;
}

class BatchedGemmTest : public testing::DeviceTest {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    const std::vector<float> dense = Ramp(kBatch * kK * kN, 61);
    const auto quantized =
        Quantize({dense.data(), DType::kF32, {kBatch, kK, kN}}, {.group_size = 32});
    ASSERT_TRUE(quantized.ok()) << quantized.status().message();
    weights_ = *Prepare(*quantized, device_);
  }

  std::string Error(const TensorView& a, const MutableTensorView& out,
                    const GemmOptions& options = {}) const {
    const Status status = BatchedGemm(device_, a, weights_, out, options);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return std::string(status.message());
  }

  PreparedWeights weights_;
  std::vector<float> a_ = Ramp(kBatch * kM * kK, 29);
  std::vector<float> out_ = std::vector<float>(kBatch * kM * kN, -1.0F);
};

TEST_P(BatchedGemmTest, HasTheBitsOfOneGemmPerMatrix) {
  const std::vector<float> bias = Ramp(kBatch * kN, 13);
  const std::vector<float> row_weight = Ramp(kBatch * kM, 7);
  for (const bool several : {false, true}) {
    GemmOptions options;
    options.activation = Activation::kSilu;
    options.bias = several ? TensorView(bias.data(), DType::kF32, {kBatch, kN})
                           : TensorView(bias.data(), DType::kF32, {kN});
    options.row_weight = TensorView(row_weight.data(), DType::kF32, {kBatch, kM});
    // The matrices of a are interleaved: row m of matrix b is row m * kBatch + b.
    const TensorView a(a_.data(), DType::kF32, {kBatch, kM, kK}, {kK, kBatch * kK, 1});
    const Status status =
        BatchedGemm(device_, a, weights_, {out_.data(), DType::kF32, {kBatch, kM, kN}}, options);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_TRUE(device_.Synchronize().ok());
    for (int64_t b = 0; b < kBatch; ++b) {
      std::vector<float> expected(kM * kN);
      GemmOptions one;
      one.activation = Activation::kSilu;
      one.expert = b;
      one.bias = TensorView(bias.data() + (several ? b * kN : 0), DType::kF32, {kN});
      one.row_weight = TensorView(row_weight.data() + b * kM, DType::kF32, {kM});
      const TensorView rows(a_.data() + b * kK, DType::kF32, {kM, kK}, {kBatch * kK, 1});
      ASSERT_TRUE(
          Gemm(device_, rows, weights_, {expected.data(), DType::kF32, {kM, kN}}, one).ok());
      ASSERT_TRUE(device_.Synchronize().ok());
      const std::vector<float> got(out_.begin() + b * kM * kN, out_.begin() + (b + 1) * kM * kN);
      ASSERT_EQ(got, expected) << b;
    }
  }
}

/// Workspaces from that of one matrix on, more matrices than one run takes, one and several blocks
/// of rows.
TEST_P(BatchedGemmTest, HasTheBitsOfOneGemmPerMatrixInEveryWorkspace) {
  constexpr int64_t kMany = 19;
  const std::vector<float> dense = Ramp(kMany * kK * kN, 53);
  const auto quantized = Quantize({dense.data(), DType::kF32, {kMany, kK, kN}}, {.group_size = 32});
  ASSERT_TRUE(quantized.ok()) << quantized.status().message();
  const PreparedWeights weights = *Prepare(*quantized, device_);
  for (const int64_t m : {1, 3, 40, 700}) {
    const std::vector<float> a = Ramp(kMany * m * kK, 29);
    std::vector<float> expected(static_cast<size_t>(kMany * m * kN));
    int64_t least = 0;
    for (int64_t b = 0; b < kMany; ++b) {
      GemmOptions options;
      options.expert = b;
      const TensorView rows(a.data() + b * m * kK, DType::kF32, {m, kK});
      const MutableTensorView to(expected.data() + b * m * kN, DType::kF32, {m, kN});
      const auto plan = PlanGemm(device_, rows, weights, to, options);
      ASSERT_TRUE(plan.ok()) << plan.status().message();
      least = plan->workspace_bytes();
      ASSERT_TRUE(Gemm(device_, rows, weights, to, options).ok());
    }
    ASSERT_TRUE(device_.Synchronize().ok());
    const int64_t sizes[] = {0, least, 2 * least + 1000, 40 * least + 100'000};
    for (const int64_t bytes : sizes) {
      const DeviceBuffer memory = *DeviceBuffer::Allocate(device_, bytes + 64);
      std::vector<uint8_t> guard(64, 0xa5);
      ASSERT_TRUE(memory.CopyFrom(guard.data(), 64, bytes).ok());
      GemmOptions options;
      options.workspace = bytes == 0 ? nullptr : memory.data();
      options.workspace_bytes = bytes;
      std::vector<float> out(expected.size(), -1.0F);
      const Status status = BatchedGemm(device_, {a.data(), DType::kF32, {kMany, m, kK}}, weights,
                                        {out.data(), DType::kF32, {kMany, m, kN}}, options);
      ASSERT_TRUE(status.ok()) << status.message();
      ASSERT_TRUE(device_.Synchronize().ok());
      ASSERT_EQ(out, expected) << m << " rows, " << bytes << " bytes";
      ASSERT_TRUE(memory.CopyTo(guard.data(), 64, bytes).ok());
      ASSERT_EQ(guard, std::vector<uint8_t>(64, 0xa5)) << m << " rows, " << bytes << " bytes";
    }
  }
}

TEST_P(BatchedGemmTest, ChecksEveryMatrixBeforeTheFirst) {
  const TensorView a(a_.data(), DType::kF32, {kBatch, kM, kK});
  const MutableTensorView out(out_.data(), DType::kF32, {kBatch, kM, kN});
  EXPECT_EQ(Error({a_.data(), DType::kF32, {kM, kK}}, out), "a: expected rank 3, got 2");
  EXPECT_EQ(Error({a_.data(), DType::kF32, {2, kM, kK}}, out), "a: expected 3 matrices, got 2");
  EXPECT_EQ(Error(a, {out_.data(), DType::kF32, {2, kM, kN}}), "out: expected 3 matrices, got 2");
  EXPECT_NE(Error({a_.data(), DType::kF32, {kBatch, kM, kK - 1}}, out).find("a: expected"),
            std::string::npos);
  EXPECT_NE(
      Error({out_.data(), DType::kF32, {kBatch, kM, kK}, {kM * kK / 2, kK, 1}}, out).find("a: "),
      std::string::npos);
  GemmOptions options;
  options.expert = 1;
  EXPECT_EQ(Error(a, out, options), "expert: expected 0 for a batch, got 1");
  options.expert = 0;
  options.bias = TensorView(a_.data(), DType::kF32, {2, kN});
  EXPECT_EQ(Error(a, out, options), "bias: expected 3 matrices, got 2");
  options.bias = {};
  options.row_weight = TensorView(a_.data(), DType::kF32, {kM});
  EXPECT_EQ(Error(a, out, options), "row_weight: expected rank 2, got 1");
  EXPECT_EQ(out_[0], -1.0F);
}

INSTANTIATE_TEST_SUITE_P(Devices, BatchedGemmTest, ::testing::Values("cpu", "metal-sim"),
                         [](const auto& test) {
                           return test.param == "cpu" ? std::string("Cpu")
                                                      : std::string("MetalSimulator");
                         });

}  // namespace
}  // namespace marlin::batched_gemm_test
