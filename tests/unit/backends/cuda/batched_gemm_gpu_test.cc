// BatchedGemm on the GPU: the bits of one Gemm per matrix, while the kernels of a batch overlap in
// one workspace.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/scalars.h"
#include "gpu_fixture.h"

namespace marlin::batched_gemm_gpu_test {
namespace {

constexpr int64_t kBatch = 19;

class BatchedOnGpu : public GpuTest<::testing::Test> {
 protected:
  PreparedWeights Keep(int64_t k, int64_t n) const {
    const std::vector<float> dense = GaussianFloats(kBatch * k * n, 3);
    const auto quantized = Quantize({dense.data(), DType::kF32, {kBatch, k, n}}, {});
    EXPECT_TRUE(quantized.ok()) << quantized.status().message();
    const auto prepared = Prepare(*quantized, device());
    EXPECT_TRUE(prepared.ok()) << prepared.status().message();
    return *prepared;
  }

  /// A batch three times, each before the last has ended, and one product per matrix.
  void Compare(const PreparedWeights& weights, int64_t m, DType type) const {
    const int64_t k = weights.spec().k;
    const int64_t n = weights.spec().n;
    const std::vector<float> values = GaussianFloats(kBatch * m * k, 5);
    std::vector<uint16_t> narrow;
    for (const float value : values) narrow.push_back(FloatToBf16(value));
    const DeviceBuffer a = type == DType::kF32 ? Upload(values) : Upload(narrow);
    const DeviceBuffer bias = Upload(GaussianFloats(kBatch * n, 7));
    const DeviceBuffer together = Make(kBatch * m * n * 4);
    const DeviceBuffer apart = Make(kBatch * m * n * 4);
    GemmOptions options;
    options.bias = {bias.data(), DType::kF32, {kBatch, n}};
    for (int run = 0; run < 3; ++run) {
      const Status status = BatchedGemm(device(), {a.data(), type, {kBatch, m, k}}, weights,
                                        {together.data(), DType::kF32, {kBatch, m, n}}, options);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    for (int64_t b = 0; b < kBatch; ++b) {
      options.expert = b;
      options.bias = {static_cast<const float*>(bias.data()) + b * n, DType::kF32, {n}};
      const TensorView rows(static_cast<const std::byte*>(a.data()) + b * m * k * DTypeBytes(type),
                            type, {m, k});
      const MutableTensorView out(static_cast<float*>(apart.data()) + b * m * n, DType::kF32,
                                  {m, n});
      ASSERT_TRUE(Gemm(device(), rows, weights, out, options).ok());
      ASSERT_TRUE(device().Synchronize().ok());
    }
    ASSERT_EQ(Download<uint32_t>(together), Download<uint32_t>(apart)) << m << " rows";
  }
};

TEST_F(BatchedOnGpu, HasTheBitsOfOneGemmPerMatrix) {
  if (IsSkipped()) return;
  // Few output tiles: sums are split along k, in clusters and in the workspace.
  for (const auto& [k, n] : {std::pair<int64_t, int64_t>{4096, 256}, {520, 1032}}) {
    const PreparedWeights weights = Keep(k, n);
    for (const int64_t m : {1, 8, 16, 40, 300}) {
      Compare(weights, m, DType::kBf16);
      Compare(weights, m, DType::kF32);
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace marlin::batched_gemm_gpu_test
