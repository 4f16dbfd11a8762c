// Split-K and stream-K through scratch memory: the last CTA adds the partial sums, or a separate
// kernel where no scratch memory is left, with the same bits.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "backends/cuda/runtime/split_k_scratch.h"
#include "base/scalars.h"
#include "gpu_fixture.h"
#include "gpu_stream.h"

namespace marlin {
namespace {

// On an H200 the activations do not fit shared memory with fewer than four splits, and fewer
// clusters of four run at once than there are n-tiles.
constexpr int64_t kM = 16;
constexpr int64_t kN = 1442;
constexpr int64_t kK = 14336;
/// An m for which an H200 runs stream-K.
constexpr int64_t kStreamedRows = 300;
constexpr int64_t kAlignment = 256;

class MeetInMemory : public GpuTest<::testing::Test> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    weights_ = PrepareGaussian(device(), kK, kN, 21);
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
    EXPECT_EQ(plan->kernel(), kernel);
    return plan->workspace_bytes();
  }

  TensorView A(int64_t rows = kM) const { return {activations_.data(), DType::kBf16, {rows, kK}}; }
  static MutableTensorView Out(const DeviceBuffer& out, int64_t rows = kM) {
    return {out.data(), DType::kF32, {rows, kN}};
  }

  /// The GEMM of the first rows with its workspace at `place` of `workspaces`.
  std::vector<float> Multiply(const DeviceBuffer& workspaces, int place, int64_t rows = kM,
                              cudaStream_t stream = nullptr) const {
    const DeviceBuffer out = Upload(std::vector<float>(static_cast<size_t>(rows * kN), -1.0F));
    EXPECT_TRUE(Launch(workspaces, place, rows, out, stream).ok());
    EXPECT_TRUE(device().Synchronize(stream).ok());
    return Download<float>(out);
  }

  Status Launch(const DeviceBuffer& workspaces, int place, int64_t rows, const DeviceBuffer& out,
                cudaStream_t stream) const {
    GemmOptions options;
    options.workspace = static_cast<uint8_t*>(workspaces.data()) + place * kAlignment;
    options.workspace_bytes = workspaces.bytes() - place * kAlignment;
    options.stream = stream;
    return Gemm(device(), A(rows), weights_, Out(out, rows), options);
  }

  /// Captures GEMMs with distinct workspaces until they hold all scratch memory for good.
  void TakeAllScratch(const DeviceBuffer& workspaces, int places) const {
    const Stream stream = MakeStream();
    const DeviceBuffer out = Make(kM * kN * 4);
    ASSERT_EQ(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
    for (int place = 0; place < places; ++place) {
      EXPECT_TRUE(Launch(workspaces, place, kM, out, stream.get()).ok());
    }
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream.get(), &graph), cudaSuccess);
    cudaGraphDestroy(graph);
  }

  PreparedWeights weights_;
  DeviceBuffer activations_;
  int64_t bytes_ = 0;
};

// Each needs scratch memory for the sums of at least two splits.
constexpr int64_t kLeastBytes = 2 * kM * kN * int64_t{sizeof(float)};
constexpr auto kPlaces = static_cast<int>(cuda::SplitKScratch::kBytes / kLeastBytes + 2);

// A long-lived process sees many workspaces and streams: neither may exhaust the memory.
TEST_F(MeetInMemory, WithManyWorkspacesAndStreams) {
  ASSERT_GT(bytes_, 0) << "this device does not split k";
  const DeviceBuffer workspaces = Make(bytes_ + kPlaces * kAlignment);
  const std::vector<float> first = Multiply(workspaces, 0);
  for (int place = 1; place < kPlaces; ++place) {
    ASSERT_EQ(Multiply(workspaces, place), first) << "workspace " << place;
  }
  for (int i = 0; i < 2 * kPlaces; ++i) {
    const Stream stream = MakeStream();
    ASSERT_EQ(Multiply(workspaces, 0, kM, stream.get()), first) << "stream " << i;
  }
  EXPECT_EQ(Multiply(workspaces, 0), first) << "the memory was not reset to all ones";
}

// Without scratch memory the reduce kernel adds, and every GEMM initializes its tile counters.
TEST_F(MeetInMemory, WithTheBitsOfTheReduceKernel) {
  ASSERT_GT(bytes_, 0) << "this device does not split k";
  const int64_t streamed_bytes = WorkspaceBytes(kStreamedRows, KernelHere("marlin_gemm_wgmma"));
  if (streamed_bytes == 0 && !Runs("marlin_gemm_wgmma")) GTEST_SKIP() << "no stream-K here";
  ASSERT_GT(streamed_bytes, 0) << "this device does not run stream-K";
  const DeviceBuffer workspaces = Make(std::max(bytes_, streamed_bytes) + kPlaces * kAlignment);
  const std::vector<float> first = Multiply(workspaces, 0);
  const std::vector<float> streamed = Multiply(workspaces, 0, kStreamedRows);
  ASSERT_EQ(Multiply(workspaces, 0, kStreamedRows), streamed)
      << "the tile counters were not reset to all ones";
  TakeAllScratch(workspaces, kPlaces);
  for (int i = 0; i < 2; ++i) {
    const Stream stream = MakeStream();
    ASSERT_EQ(Multiply(workspaces, 0, kM, stream.get()), first);
    ASSERT_EQ(Multiply(workspaces, 0, kStreamedRows, stream.get()), streamed);
  }
}

// Another m has its sums elsewhere in the same memory: words that were not reset to all ones would
// be taken for sums. Fewer than 13 rows would have two splits, which reduce in a cluster.
TEST_F(MeetInMemory, OfOtherSizesInOneWorkspace) {
  ASSERT_GT(bytes_, 0) << "this device does not split k";
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
