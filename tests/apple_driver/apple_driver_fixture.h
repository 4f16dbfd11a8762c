// The driver for Apple GPUs on the fake GPU, and launches of the self-test kernel.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "backends/metal/apple/apple_driver.h"
#include "backends/metal/runtime/driver.h"
#include "fake_gpu.h"
#include "objective_c.h"

namespace marlin::metal {

using fake_gpu::TheBehaviour;
using fake_gpu::TheLog;

inline constexpr int kInputs = 134;
inline constexpr int kOutputs = 229;
inline constexpr int64_t kPage = 4096;

/// Inputs of marlin_self_test with B = 1: A x B equals A and is written from out[128] on.
inline std::vector<float> Input(float first) {
  std::vector<float> input(kInputs);
  for (int i = 0; i < 64; ++i) input[static_cast<size_t>(i)] = first + static_cast<float>(i);
  for (int i = 0; i < 8; ++i) input[static_cast<size_t>(64 + 9 * i)] = 1;
  return input;
}

inline KernelLaunch LaunchOf(const void* input, void* out, int64_t out_bytes = kOutputs * 4) {
  KernelLaunch launch;
  launch.source = "self_test.metal";
  launch.function = "marlin_self_test";
  launch.parameters.k = 1;
  launch.buffers = {{MARLIN_BUFFER_INPUT, input, kInputs * 4},
                    {MARLIN_BUFFER_OUTPUT, out, out_bytes, true, false}};
  return launch;
}

class AppleDriver : public testing::Test {
 protected:
  void SetUp() override { fake_gpu::Reset(); }
  // No test may leave living objects behind.
  void TearDown() override {
    driver_.reset();
    EXPECT_EQ(fake_objc::LivingObjects(), "");
  }

  void Open() {
    Result<std::unique_ptr<Driver>> driver = OpenAppleDriver();
    ASSERT_TRUE(driver.ok()) << driver.status().message();
    driver_ = std::move(*driver);
  }
  static Status OpenError() {
    const Result<std::unique_ptr<Driver>> driver = OpenAppleDriver();
    return driver.ok() ? Status() : driver.status();
  }
  float* Floats(int64_t count) {
    const Result<void*> data = driver_->Allocate(count * 4);
    EXPECT_TRUE(data.ok());
    return static_cast<float*>(*data);
  }
  float* DeviceInput(float first) {
    float* data = Floats(kInputs);
    std::memcpy(data, Input(first).data(), kInputs * 4);
    return data;
  }
  Status Run(const KernelLaunch& launch, void* stream = nullptr) {
    return driver_->Run({&launch, 1}, stream);
  }

  std::unique_ptr<Driver> driver_;
};

}  // namespace marlin::metal
