// Tensors and devices for the tests of the decoder operations.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "../test_device.h"
#include "base/scalars.h"
#include "marlin/device.h"
#include "marlin/tensor.h"
#include "reference/decoder.h"
#include "reference/elements.h"

namespace marlin {

/// A tensor with its own memory; rows may be strided.
class Tensor {
 public:
  Tensor(DType dtype, const Shape& shape, int64_t pad = 0) : dtype_(dtype), shape_(shape) {
    int64_t stride = 1;
    for (int i = shape.rank() - 1; i >= 0; --i) {
      strides_.insert(strides_.begin(), stride);
      stride = stride * shape[i] + (i == shape.rank() - 1 ? pad : 0);
    }
    bytes_.assign(static_cast<size_t>(stride * DTypeBytes(dtype)) + 64, 0xff);  // NaN padding.
  }
  /// Rank 3 with the second dimension outermost in memory, like a cache with contiguous keys per
  /// head.
  static Tensor ByHead(DType dtype, const Shape& shape) {
    Tensor tensor(dtype, shape);
    tensor.strides_ = {shape[2], shape[0] * shape[2], 1};
    return tensor;
  }
  Tensor& Fill(unsigned seed, double scale = 1.0) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal(0.0, scale);
    Shape index;
    for (int i = 0; i < shape_.rank(); ++i) index.Append(0);
    for (int64_t n = shape_.ElementCount(); n > 0; --n) {
      int64_t at = 0;
      for (int i = 0; i < shape_.rank(); ++i) at += index[i] * strides_[static_cast<size_t>(i)];
      Set(at, static_cast<float>(normal(random)));
      for (int i = shape_.rank() - 1; i >= 0 && ++index[i] == shape_[i]; --i) index[i] = 0;
    }
    return *this;
  }
  void Set(int64_t at, float value) {
    void* data = bytes_.data();
    if (dtype_ == DType::kF32) static_cast<float*>(data)[at] = value;
    if (dtype_ == DType::kBf16) static_cast<uint16_t*>(data)[at] = FloatToBf16(value);
    if (dtype_ == DType::kF16) static_cast<uint16_t*>(data)[at] = FloatToHalf(value);
  }
  MutableTensorView view() {
    MutableTensorView v(bytes_.data(), dtype_, shape_);
    for (int i = 0; i < shape_.rank(); ++i) v.set_stride(i, strides_[static_cast<size_t>(i)]);
    return v;
  }

 private:
  DType dtype_;
  Shape shape_;
  std::vector<int64_t> strides_;
  std::vector<uint8_t> bytes_;
};

/// One ULP of a type, relative.
inline double Unit(DType dtype) {
  return dtype == DType::kF32 ? 0x1p-23 : (dtype == DType::kF16 ? 0x1p-10 : 0x1p-7);
}

inline void ExpectNear(const TensorView& got, const std::vector<double>& want, double relative,
                       double absolute, const std::string& what) {
  const std::vector<double> values = reference::Elements(got);
  ASSERT_EQ(values.size(), want.size()) << what;
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(values[i], want[i], absolute + relative * std::abs(want[i])) << what << " at " << i;
  }
}

/// Opens the CPU at a level, "metal_sim": the Metal simulator, or the device of the program.
inline Result<Device> OpenNamed(const std::string& name, int threads) {
  if (name == TestDevice()) return Device::Open(name, {.threads = threads});
  if (name == "metal_sim") return Device::Open("metal-sim", {.threads = threads});
  EXPECT_EQ(setenv("MARLIN_CPU", name.c_str(), 1), 0);
  Result<Device> device = Device::Open("cpu", {.threads = threads});
  EXPECT_EQ(unsetenv("MARLIN_CPU"), 0);
  return device;
}

inline Device OpenWith(const char* name, int threads) { return *OpenNamed(name, threads); }

/// A device at one level of this CPU, with several threads, and one with host memory.
class OnEveryLevel : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    // Opened once for all tests of a program: it compiles its kernels when they first run.
    static std::map<std::string, Result<Device>> devices;
    const std::string name = GetParam();
    const auto found = devices.find(name);
    const Result<Device>& device = found != devices.end()
                                       ? found->second
                                       : devices.emplace(name, OpenNamed(name, 3)).first->second;
    if (!device.ok()) GTEST_SKIP() << device.status().message();
    device_ = *device;
  }
  const Device& device() const { return *device_; }

 private:
  std::optional<Device> device_;
};
inline std::vector<const char*> Levels() {
  if (OnOtherDevice()) return {TestDevice()};
  return {"scalar", "avx2", "avx512", "amx", "neon", "metal_sim"};
}

/// Every level, with the name of the suite, which is a program's only one of that name:
///   using DecoderOnEveryLevel = OnEveryLevel;
///   MARLIN_ON_EVERY_LEVEL(DecoderOnEveryLevel);
#define MARLIN_ON_EVERY_LEVEL(Suite)                                     \
  INSTANTIATE_TEST_SUITE_P(Levels, Suite, ::testing::ValuesIn(Levels()), \
                           [](const auto& level) { return NameOfDevice(level.param); })

inline constexpr DType kTypes[] = {DType::kF32, DType::kBf16, DType::kF16};

}  // namespace marlin
