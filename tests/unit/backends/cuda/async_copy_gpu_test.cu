// Asynchronous copies of buffers: enqueued on a stream, between the kernels before and behind them.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "gpu_fixture.h"
#include "gpu_stream.h"

namespace marlin {
namespace {

constexpr int64_t kM = 5;
constexpr int64_t kK = 1024;
constexpr int64_t kN = 192;

struct FreePinned {
  void operator()(float* data) const { (void)cudaFreeHost(data); }
};
using PinnedFloats = std::unique_ptr<float[], FreePinned>;

/// Page-locked memory.
PinnedFloats Pin(int64_t count) {
  void* data = nullptr;
  EXPECT_EQ(cudaMallocHost(&data, static_cast<size_t>(count) * sizeof(float)), cudaSuccess);
  return PinnedFloats(static_cast<float*>(data));
}

class AsyncCopy : public GpuTest<::testing::Test> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    weights_ = PrepareGaussian(device(), kK, kN, 17);
    stream_ = MakeStream();
    input_ = Make(kM * kK * 4);
    out_ = Make(kM * kN * 4);
  }

  void Multiply() const {
    GemmOptions options;
    options.stream = stream_.get();
    const Status status = Gemm(device(), {input_.data(), DType::kF32, {kM, kK}}, weights_,
                               {out_.data(), DType::kF32, {kM, kN}}, options);
    EXPECT_TRUE(status.ok()) << status.message();
  }

  /// The product, with blocking copies.
  std::vector<float> Expected(const std::vector<float>& a) const {
    EXPECT_TRUE(input_.CopyFrom(a.data(), input_.bytes()).ok());
    Multiply();
    EXPECT_TRUE(device().Synchronize(stream_.get()).ok());
    return Download<float>(out_);
  }

  /// The product, with copies on its stream.
  Status CopyMultiplyCopy(const float* a, float* out) const {
    const Status sent = input_.CopyFromAsync(a, input_.bytes(), 0, stream_.get());
    if (!sent.ok()) return sent;
    Multiply();
    return out_.CopyToAsync(out, out_.bytes(), 0, stream_.get());
  }

  PreparedWeights weights_;
  Stream stream_;
  DeviceBuffer input_;
  DeviceBuffer out_;
};

TEST_F(AsyncCopy, IsInTheOrderOfItsStream) {
  const PinnedFloats a = Pin(kM * kK);
  const PinnedFloats pinned = Pin(kM * kN);
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    const std::vector<float> values = GaussianFloats(kM * kK, seed);
    const std::vector<float> expected = Expected(values);
    std::copy(values.begin(), values.end(), a.get());
    ASSERT_TRUE(CopyMultiplyCopy(a.get(), pinned.get()).ok());
    ASSERT_TRUE(device().Synchronize(stream_.get()).ok());
    EXPECT_EQ(std::vector<float>(pinned.get(), pinned.get() + kM * kN), expected);
    std::vector<float> pageable(kM * kN);
    ASSERT_TRUE(CopyMultiplyCopy(values.data(), pageable.data()).ok());
    ASSERT_TRUE(device().Synchronize(stream_.get()).ok());
    EXPECT_EQ(pageable, expected);
  }
}

// The stream stands still in a function of the host until the calls have returned.
TEST_F(AsyncCopy, ReturnsBeforeTheCopyIsDone) {
  const std::vector<float> values = GaussianFloats(kM * kK, 5);
  const std::vector<float> expected = Expected(values);
  const PinnedFloats a = Pin(kM * kK);
  const PinnedFloats out = Pin(kM * kN);
  std::copy(values.begin(), values.end(), a.get());
  std::fill_n(out.get(), kM * kN, -1.0F);
  std::promise<void> go;
  // The limit lets a copy that waits fail the test instead of hanging it.
  const auto wait = [](void* ready) {
    static_cast<std::future<void>*>(ready)->wait_for(std::chrono::seconds(20));
  };
  std::future<void> ready = go.get_future();
  ASSERT_EQ(cudaLaunchHostFunc(stream_.get(), wait, &ready), cudaSuccess);
  const Status status = CopyMultiplyCopy(a.get(), out.get());
  const std::vector<float> before(out.get(), out.get() + kM * kN);
  const cudaError_t busy = cudaStreamQuery(stream_.get());
  // A range outside of the buffer enqueues nothing.
  const Status outside = out_.CopyToAsync(out.get(), out_.bytes(), 4, stream_.get());
  go.set_value();
  ASSERT_TRUE(device().Synchronize(stream_.get()).ok());
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(busy, cudaErrorNotReady);
  EXPECT_EQ(before, std::vector<float>(kM * kN, -1.0F));
  EXPECT_EQ(outside.code(), Code::kInvalidArgument);
  EXPECT_EQ(std::vector<float>(out.get(), out.get() + kM * kN), expected);
}

}  // namespace
}  // namespace marlin
