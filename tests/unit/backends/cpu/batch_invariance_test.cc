// Batch invariance of the CPU GEMMs: a row's bits depend neither on the number of rows nor on the
// other rows, whichever path of a kernel computes it.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/scalars.h"
#include "marlin/gemm.h"
#include "marlin/quantize.h"

namespace marlin::batch_invariance_test {
namespace {

constexpr int64_t kN = 40;
constexpr int64_t kK = 1300;  // More than one KC block, and no whole chunk at the end.
constexpr int64_t kMostRows = 27;

std::vector<float> Floats(int64_t count, int seed) {
  std::vector<float> values(static_cast<size_t>(count));
  uint32_t state = static_cast<uint32_t>(seed) * 2654435761U + 1;
  for (float& value : values) {
    state = state * 1664525U + 1013904223U;
    value = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31F;
  }
  return values;
}

struct Case {
  QuantizeOptions weights;
  DType a_type;
};

class BatchInvariance : public ::testing::TestWithParam<Case> {
 protected:
  /// The first m rows of the output. Fails the test unless the kernel refuses the problem.
  std::vector<float> Run(int64_t m, const std::string& kernel) {
    std::vector<float> out(static_cast<size_t>(m * kN));
    GemmOptions options;
    options.determinism = Determinism::kBatchInvariant;
    options.kernel = kernel;
    const Status status = Gemm(device_, {a_.data(), GetParam().a_type, {m, kK}}, weights_,
                               {out.data(), DType::kF32, {m, kN}}, options);
    if (status.code() == Code::kUnsupported) return {};
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  }

  void SetUp() override {
    std::vector<float> dense = Floats(kN * kK, 1);
    const auto quantized = Quantize({dense.data(), DType::kF32, {kK, kN}}, GetParam().weights);
    ASSERT_TRUE(quantized.ok()) << quantized.status().message();
    const auto prepared = Prepare(*quantized, device_);
    ASSERT_TRUE(prepared.ok()) << prepared.status().message();
    weights_ = *prepared;
    const std::vector<float> floats = Floats(kMostRows * kK, 2);
    for (size_t i = 0; i < floats.size(); ++i) {
      const uint16_t bits = FloatToBf16(floats[i]);
      std::memcpy(a_.data() + i * static_cast<size_t>(DTypeBytes(GetParam().a_type)),
                  GetParam().a_type == DType::kBf16 ? static_cast<const void*>(&bits) : &floats[i],
                  static_cast<size_t>(DTypeBytes(GetParam().a_type)));
    }
  }

  Device device_ = *Device::Open("cpu", {.threads = 2});
  PreparedWeights weights_;
  std::vector<uint8_t> a_ = std::vector<uint8_t>(kMostRows * kK * sizeof(float));
};

TEST_P(BatchInvariance, HoldsForEveryKernel) {
  std::vector<std::string> kernels = {""};  // The selected one.
  for (const KernelInfo& kernel : device_.info().kernels) {
    if (kernel.available) kernels.push_back(kernel.name);
  }
  size_t ran = 0;
  for (const std::string& kernel : kernels) {
    const std::vector<float> all = Run(kMostRows, kernel);
    if (all.empty()) continue;
    ++ran;
    for (int64_t m = 1; m < kMostRows; ++m) {
      const std::vector<float> some = Run(m, kernel);
      ASSERT_EQ(some.size(), static_cast<size_t>(m * kN));
      for (size_t i = 0; i < some.size(); ++i) {
        ASSERT_EQ(some[i], all[i]) << kernel << ", m " << m << ", output " << i;
      }
    }
  }
  EXPECT_GE(ran, 2U);
}

INSTANTIATE_TEST_SUITE_P(
    Weights, BatchInvariance,
    ::testing::Values(Case{{.format = Format::kFp4E2M1, .group_size = 128}, DType::kBf16},
                      Case{{.format = Format::kFp4E2M1, .group_size = 32}, DType::kBf16},
                      Case{{.format = Format::kFp4E2M1, .group_size = 16}, DType::kF32},
                      Case{{.format = Format::kU4, .group_size = 64}, DType::kBf16},
                      Case{{.format = Format::kInt3, .group_size = 128}, DType::kBf16},
                      Case{{.format = Format::kInt2, .group_size = 32}, DType::kF32},
                      Case{{.format = Format::kS8, .group_size = 128}, DType::kBf16},
                      Case{{.format = Format::kFp8E4M3, .group_size = 128}, DType::kBf16}));

}  // namespace
}  // namespace marlin::batch_invariance_test
