// Blocks that divide k and meet in memory: the last adds the parts, or a kernel of its own where
// that memory is lent, with the same bits.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "backends/cuda/meeting_memory.h"
#include "base/scalars.h"
#include "gpu_fixture.h"

namespace marlin {
namespace {

// An H200 does not hold the activations with fewer than four blocks to a k, and runs fewer
// clusters of four than there are strips.
constexpr int64_t kM = 16;
constexpr int64_t kN = 1442;
constexpr int64_t kK = 14336;
/// Rows of which an H200's blocks take parts of tiles.
constexpr int64_t kStreamedRows = 300;
constexpr int64_t kAlignment = 256;

class MeetInMemory : public GpuTest<::testing::Test> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    const std::vector<float> dense = GaussianFloats(kK * kN, 21);
    const Result<QuantizedWeights> weights = Quantize({dense.data(), DType::kF32, {kK, kN}}, {});
    ASSERT_TRUE(weights.ok()) << weights.status().message();
    const Result<PreparedWeights> prepared = Prepare(*weights, device());
    ASSERT_TRUE(prepared.ok()) << prepared.status().message();
    weights_ = *prepared;
    std::vector<uint16_t> activations;
    for (const float value : GaussianFloats(kStreamedRows * kK, 22)) {
      activations.push_back(FloatToBf16(value));
    }
    activations_ = Upload(activations);
    bytes_ = WorkspaceBytes(kM, "marlin_gemv_mma");
  }

  int64_t WorkspaceBytes(int64_t rows, const std::string& kernel) const {
    const DeviceBuffer out = Make(1);
    const Result<GemmPlan> plan = PlanGemm(device(), A(rows), weights_, Out(out, rows));
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    if (!plan.ok()) return 0;
    EXPECT_EQ(plan->kernel, kernel);
    return plan->workspace_bytes;
  }

  TensorView A(int64_t rows = kM) const { return {activations_.data(), DType::kBf16, {rows, kK}}; }
  static MutableTensorView Out(const DeviceBuffer& out, int64_t rows = kM) {
    return {out.data(), DType::kF32, {rows, kN}};
  }

  /// The product of the first rows with its workspace at `place` of `workspaces`.
  std::vector<float> Multiply(const DeviceBuffer& workspaces, int place, int64_t rows = kM) const {
    const DeviceBuffer out = Upload(std::vector<float>(static_cast<size_t>(rows * kN), -1.0F));
    GemmOptions options;
    options.workspace = static_cast<uint8_t*>(workspaces.data()) + place * kAlignment;
    options.workspace_bytes = workspaces.bytes() - place * kAlignment;
    EXPECT_TRUE(Gemm(device(), A(rows), weights_, Out(out, rows), options).ok());
    EXPECT_TRUE(device().Synchronize().ok());
    return Download<float>(out);
  }

  PreparedWeights weights_;
  DeviceBuffer activations_;
  int64_t bytes_ = 0;
};

TEST_F(MeetInMemory, WithTheBitsOfTheReduceKernel) {
  ASSERT_GT(bytes_, 0) << "this device does not divide k";
  // Each wants memory for the sums of at least two splits, until there is none.
  constexpr int64_t kLeastBytes = 2 * kM * kN * int64_t{sizeof(float)};
  constexpr auto kPlaces = static_cast<int>(cuda::MeetingMemory::kBytes / kLeastBytes + 2);
  const DeviceBuffer workspaces = Make(bytes_ + kPlaces * kAlignment);
  const std::vector<float> first = Multiply(workspaces, 0);
  for (int place = 1; place < kPlaces; ++place) {
    ASSERT_EQ(Multiply(workspaces, place), first) << "workspace " << place;
  }
  EXPECT_EQ(Multiply(workspaces, 0), first) << "the memory is all ones again";
}

// Tickets that are not lent are made ready for every product.
TEST_F(MeetInMemory, InPartsOfTilesWhereverTicketsLie) {
  const int64_t bytes = WorkspaceBytes(kStreamedRows, "marlin_gemm_wgmma");
  ASSERT_GT(bytes, 0) << "this device does not stream tiles";
  const DeviceBuffer lent = Make(bytes);
  const std::vector<float> first = Multiply(lent, 0, kStreamedRows);
  ASSERT_EQ(Multiply(lent, 0, kStreamedRows), first) << "the tickets are all ones again";
  // Until there is none to lend.
  constexpr int64_t kLeastBytes = 2 * kM * kN * int64_t{sizeof(float)};
  constexpr auto kPlaces = static_cast<int>(cuda::MeetingMemory::kBytes / kLeastBytes + 2);
  const DeviceBuffer workspaces = Make(bytes_ + kPlaces * kAlignment);
  for (int place = 0; place < kPlaces; ++place) Multiply(workspaces, place);
  const DeviceBuffer others = Make(bytes);
  for (int i = 0; i < 2; ++i) ASSERT_EQ(Multiply(others, 0, kStreamedRows), first);
}

// Other rows have their sums elsewhere in the same memory: words that were not all ones again would
// be taken for sums. Fewer than 13 rows would be divided in two, which meet in a cluster.
TEST_F(MeetInMemory, OfOtherSizesInOneWorkspace) {
  ASSERT_GT(bytes_, 0) << "this device does not divide k";
  const DeviceBuffer workspaces = Make(bytes_ + (kM + 1) * kAlignment);
  std::vector<std::vector<float>> of_fresh_memory;
  for (int64_t rows = 13; rows <= kM; ++rows) {
    of_fresh_memory.push_back(Multiply(workspaces, static_cast<int>(rows), rows));
  }
  for (int i = 0; i < 3; ++i) {
    for (int64_t rows = 13; rows <= kM; ++rows) {
      ASSERT_EQ(Multiply(workspaces, 0, rows), of_fresh_memory[static_cast<size_t>(rows - 13)])
          << rows << " rows, " << i;
    }
  }
}

}  // namespace
}  // namespace marlin
