// A kernel that faults makes the device unusable: every later call reports the first error.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "gpu_fixture.h"

namespace marlin::lost_device_gpu_test {
namespace {

constexpr int64_t kSize = 256;

class LostDevice : public GpuTest<::testing::Test> {
 protected:
  void SetUp() override {
    // Runs in a child process: a CUDA context does not survive fork, nor this error.
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    GpuTest::SetUp();
  }

  /// Reads activations from an address that nothing is mapped to.
  Status MultiplyNothing(const PreparedWeights& weights, const DeviceBuffer& out) const {
    auto* const nowhere = reinterpret_cast<const void*>(uintptr_t{4096});
    return Gemm(device(), {nowhere, DType::kBf16, {1, kSize}}, weights,
                {out.data(), DType::kF32, {1, kSize}});
  }

  /// Runs in the child: whether every call reports the lost device and the first error.
  bool EveryCallFails() const {
    const std::vector<float> dense = GaussianFloats(kSize * kSize, 3);
    const Result<QuantizedWeights> weights =
        Quantize({dense.data(), DType::kF32, {kSize, kSize}}, {});
    const Result<PreparedWeights> prepared = Prepare(*weights, device());
    if (!prepared.ok()) return false;
    const DeviceBuffer out = Make(kSize * 4);
    if (!MultiplyNothing(*prepared, out).ok()) return false;
    const Status first = device().Synchronize();
    std::fprintf(stderr, "first: %s\n", first.message().c_str());
    if (first.code() != Code::kDeviceLost) return false;
    // "call: error (description)": every later call repeats the error.
    const std::string error = first.message().substr(first.message().find(": ") + 2);
    std::vector<float> host(kSize);
    const std::vector<std::function<Status()>> calls = {
        [&] { return device().Synchronize(); },
        [&] { return MultiplyNothing(*prepared, out); },
        [&] { return Prepare(*weights, device()).status(); },
        [&] { return DeviceBuffer::Allocate(device(), 64).status(); },
        [&] { return out.CopyTo(host.data(), kSize * 4); },
        [&] { return out.CopyFrom(host.data(), kSize * 4); },
        [&] { return out.CopyToAsync(host.data(), kSize * 4); },
        [&] { return out.CopyFromAsync(host.data(), kSize * 4); },
        [&] {
          return Dequantize(device(), *prepared, {out.data(), DType::kF32, {kSize, kSize}});
        },
    };
    bool all = true;
    for (const auto& call : calls) {
      const Status status = call();
      std::fprintf(stderr, "later: %s\n", status.message().c_str());
      all = all && status.code() == Code::kDeviceLost &&
            status.message() == "the device failed before: " + error;
    }
    return all;
  }
};

TEST_F(LostDevice, IsLostForEveryLaterCall) {
  EXPECT_EXIT(std::_Exit(EveryCallFails() ? 0 : 1), ::testing::ExitedWithCode(0), "first: ");
  // The context of this process still works.
  EXPECT_TRUE(device().Synchronize().ok());
  EXPECT_NE(Make(64).data(), nullptr);
}

/// Refused calls leave the device usable.
TEST_F(LostDevice, SurvivesRefusals) {
  EXPECT_EQ(DeviceBuffer::Allocate(device(), int64_t{1} << 60).status().code(), Code::kOutOfMemory);
  EXPECT_TRUE(device().Synchronize().ok());
  EXPECT_NE(Make(64).data(), nullptr);
}

}  // namespace
}  // namespace marlin::lost_device_gpu_test
