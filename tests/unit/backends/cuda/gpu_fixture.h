// Fixture of GPU tests: the device, or the reason for skipping, and memory on it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "marlin/marlin.h"

namespace marlin {

/// Base of tests on the current CUDA device. `Parent` is ::testing::Test or TestWithParam.
template <typename Parent>
class GpuTest : public Parent {
 protected:
  void SetUp() override {
    const Result<Device> device = Device::Open("cuda");
    // tests/CMakeLists.txt matches this text.
    if (!device.ok()) GTEST_SKIP() << "no CUDA device: " << device.status().message();
    device_ = *device;
  }

  const Device& device() const { return *device_; }

  /// The kernel of a name with "wgmma", or where the device runs none of these the kernel in its
  /// place, with "mma"; empty if the device has neither.
  std::string KernelHere(std::string name) const {
    if (Runs(name)) return name;
    if (const size_t at = name.find("wgmma"); at != std::string::npos) name.replace(at, 5, "mma");
    return Runs(name) ? name : "";
  }
  bool Runs(const std::string& kernel) const {
    return std::ranges::any_of(device_->info().kernels, [&](const KernelInfo& info) {
      return info.name == kernel && info.available;
    });
  }

  /// Device memory; a failed allocation fails the test.
  DeviceBuffer Make(int64_t bytes) const {
    Result<DeviceBuffer> buffer = DeviceBuffer::Allocate(*device_, bytes);
    EXPECT_TRUE(buffer.ok()) << buffer.status().message();
    return buffer.ok() ? std::move(*buffer) : DeviceBuffer();
  }

  template <typename E>
  DeviceBuffer Upload(const std::vector<E>& elements) const {
    const auto bytes = static_cast<int64_t>(elements.size() * sizeof(E));
    DeviceBuffer buffer = Make(bytes);
    EXPECT_TRUE(buffer.CopyFrom(elements.data(), bytes).ok());
    return buffer;
  }

  template <typename E>
  std::vector<E> Download(const DeviceBuffer& buffer) const {
    std::vector<E> elements(static_cast<size_t>(buffer.bytes()) / sizeof(E));
    EXPECT_TRUE(buffer.CopyTo(elements.data(), buffer.bytes()).ok());
    return elements;
  }

 private:
  std::optional<Device> device_;
};

inline std::vector<float> GaussianFloats(int64_t count, uint32_t seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> draw;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = draw(bits);
  return values;
}

/// FP4 weights [k, n] of Gaussian numbers, prepared; a failure fails the test.
inline PreparedWeights PrepareGaussian(const Device& device, int64_t k, int64_t n, uint32_t seed) {
  const std::vector<float> dense = GaussianFloats(k * n, seed);
  const Result<QuantizedWeights> weights = Quantize({dense.data(), DType::kF32, {k, n}}, {});
  EXPECT_TRUE(weights.ok()) << weights.status().message();
  if (!weights.ok()) return {};
  const Result<PreparedWeights> prepared = Prepare(*weights, device);
  EXPECT_TRUE(prepared.ok()) << prepared.status().message();
  return prepared.ok() ? *prepared : PreparedWeights();
}

}  // namespace marlin
