// The self-test that runs when a GPU is opened, on the simulator: it passes, and it reports
// injected errors.
#include "backends/metal/self_test.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <functional>
#include <utility>

#include "backends/metal/metal_backend.h"
#include "backends/metal/plan/kernel_check.h"
#include "backends/metal/runtime/simulated_driver.h"

namespace marlin::metal::self_test_test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

/// The simulator, with a change applied to the outputs of every launch.
class ChangedDriver final : public Driver {
 public:
  using Change = std::function<void(const KernelLaunch& launch, float* out)>;
  ChangedDriver(std::shared_ptr<Driver> driver, Change change)
      : driver_(std::move(driver)), change_(std::move(change)) {}

  DriverInfo Info() const override { return driver_->Info(); }
  DeviceShape Shape() const override { return driver_->Shape(); }
  Status Run(std::span<const KernelLaunch> launches, void* stream) override {
    Status status = driver_->Run(launches, stream);
    for (const KernelLaunch& launch : launches) {
      for (const KernelBuffer& buffer : launch.buffers) {
        // Safe const_cast: written buffers are mutable at their origin.
        if (buffer.written) change_(launch, static_cast<float*>(const_cast<void*>(buffer.data)));
      }
    }
    return status;
  }
  Status Synchronize(void* stream) override { return driver_->Synchronize(stream); }
  bool calls_block() const override { return driver_->calls_block(); }
  Result<void*> Allocate(int64_t bytes) override { return driver_->Allocate(bytes); }
  void Free(void* data) override { driver_->Free(data); }

 private:
  std::shared_ptr<Driver> driver_;
  Change change_;
};

std::unique_ptr<Driver> Simulator() {
  Result<std::unique_ptr<Driver>> driver = OpenSimulatedDriver();
  EXPECT_TRUE(driver.ok()) << driver.status().message();
  return std::move(*driver);
}

SelfTest Ask(Driver& driver) {
  const Result<SelfTest> result = RunSelfTest(driver);
  EXPECT_TRUE(result.ok()) << result.status().message();
  return *result;
}

SelfTest AskChanged(int index, float value) {
  static const std::shared_ptr<Driver> simulator = Simulator();
  ChangedDriver driver(simulator, [&](const KernelLaunch&, float* out) { out[index] = value; });
  return Ask(driver);
}

TEST(SelfTest, TheSimulatorPasses) {
  const SelfTest result = Ask(*Simulator());
  EXPECT_TRUE(result.known_fragments);
  EXPECT_TRUE(result.keeps_subnormals);
  EXPECT_EQ(result.Wrong(), "");
}

TEST(SelfTest, FastMathIsNoticed) {
  ASSERT_EQ(setenv("MARLIN_METAL_SIM_FAST_MATH", "1", 1), 0);
  const SelfTest result = Ask(*Simulator());
  ASSERT_EQ(unsetenv("MARLIN_METAL_SIM_FAST_MATH"), 0);
  EXPECT_TRUE(result.known_fragments);
  EXPECT_TRUE(result.right_products);
  EXPECT_FALSE(result.keeps_nans);
  EXPECT_THAT(result.Wrong(), HasSubstr("compiled with fast math"));
}

TEST(SelfTest, EveryAnswerCounts) {
  EXPECT_FALSE(AskChanged(63, 0).known_fragments);
  EXPECT_EQ(AskChanged(63, 0).Wrong(), "");
  EXPECT_FALSE(AskChanged(64 + 7, 0.5F).known_fragments);
  EXPECT_THAT(AskChanged(128, 0.5F).Wrong(), HasSubstr("product of two 8x8 matrices"));
  EXPECT_THAT(AskChanged(192, 0).Wrong(), HasSubstr("a NaN equals itself"));
  EXPECT_THAT(AskChanged(193, 1).Wrong(), HasSubstr("a sum was reassociated"));
  EXPECT_THAT(AskChanged(195, 0).Wrong(), HasSubstr("through an address in a buffer"));
  EXPECT_THAT(AskChanged(196 + 31, 0).Wrong(), HasSubstr("simd_shuffle or simd_sum"));
  EXPECT_THAT(AskChanged(228, 495).Wrong(), HasSubstr("simd_shuffle or simd_sum"));
  EXPECT_FALSE(AskChanged(194, 0).keeps_subnormals);
  EXPECT_EQ(AskChanged(194, 0).Wrong(), "");
}

TEST(CheckKernels, TheSimulatorPasses) {
  const Status status = CheckKernels(*MakeMetalBackend(Simulator()));
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST(CheckKernels, NamesTheKernelThatIsWrong) {
  const auto change = [](const KernelLaunch& launch, float* out) {
    if (launch.function == "marlin_gemm_direct_64x64") out[72 * 69 + 71] += 0.5F;
  };
  auto driver = std::make_unique<ChangedDriver>(Simulator(), change);
  const Status status = CheckKernels(*MakeMetalBackend(std::move(driver)));
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_THAT(status.message(), StartsWith("self-test: marlin_gemm_fused_fp4: out[69, 71] is "));
}

}  // namespace
}  // namespace marlin::metal::self_test_test
