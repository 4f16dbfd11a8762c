// GEMMs on Device::Open("metal") with the fake GPU and on "metal-sim": both run the same kernels in
// the same simulator, so the bits must be equal for every kind of memory and launch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <array>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "base/split_mix64.h"
#include "fake_gpu.h"
#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/quantize.h"
#include "objective_c.h"

namespace marlin {
namespace {

using fake_gpu::TheBehaviour;
using fake_gpu::TheLog;

/// A GEMM with every epilogue operand.
struct Product {
  const char* kernel = "";
  Format format = Format::kFp4E2M1;
  int64_t m = 1;
  int64_t n = 72;
  int64_t k = 160;
  bool gated = false;
  bool bias = false;
};

std::vector<float> RandomFloats(int64_t count, uint64_t seed) {
  SplitMix64 random(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(random.Next() % 2048) / 1024.0F - 1.0F;
  return values;
}

/// Location of the operands: host or device memory.
enum class Place { kHost, kDevice };

class AppleProducts : public testing::Test {
 protected:
  void SetUp() override {
    fake_gpu::Reset();
    ASSERT_EQ(setenv("MARLIN_METAL_SELF_TEST", "probe", 1), 0);  // Not every kernel every time.
    simulator_ = OpenDevice("metal-sim");
    apple_ = OpenDevice("metal");
  }
  void TearDown() override {
    ASSERT_EQ(unsetenv("MARLIN_METAL_SELF_TEST"), 0);
    apple_.reset();
    EXPECT_EQ(fake_objc::LivingObjects(), "");
  }

  static std::optional<Device> OpenDevice(const char* name) {
    Result<Device> device = Device::Open(name);
    EXPECT_TRUE(device.ok()) << device.status().message();
    if (!device.ok()) return std::nullopt;
    return *device;
  }

  static QuantizedWeights WeightsOf(const Product& product) {
    const std::vector<float> dense = RandomFloats(product.k * product.n, 1);
    QuantizeOptions options;
    options.format = product.format;
    options.group_size = 32;
    Result<QuantizedWeights> weights =
        Quantize(TensorView(dense.data(), DType::kF32, Shape{product.k, product.n}), options);
    EXPECT_TRUE(weights.ok()) << weights.status().message();
    return *weights;
  }

  static std::vector<float> Run(const Device& device, const Product& product, Place place,
                                void* stream = nullptr) {
    const Result<PreparedWeights> weights = Prepare(WeightsOf(product), device);
    EXPECT_TRUE(weights.ok()) << weights.status().message();
    const std::vector<float> a = RandomFloats(product.m * product.k, 2);
    const std::vector<float> bias = RandomFloats(product.n, 3);
    const int64_t columns = product.gated ? product.n / 2 : product.n;
    std::vector<float> c(static_cast<size_t>(product.m * columns), -1);
    const auto bytes = [](const std::vector<float>& data) {
      return static_cast<int64_t>(data.size() * sizeof(float));
    };
    Result<DeviceBuffer> device_a = DeviceBuffer::Allocate(device, bytes(a));
    Result<DeviceBuffer> device_c = DeviceBuffer::Allocate(device, bytes(c));
    EXPECT_TRUE(device_a->CopyFrom(a.data(), bytes(a)).ok());
    const bool on_host = place == Place::kHost;
    const void* const a_data = on_host ? static_cast<const void*>(a.data()) : device_a->data();
    void* const c_data = on_host ? static_cast<void*>(c.data()) : device_c->data();
    GemmOptions options;
    options.kernel = product.kernel;
    options.gated = product.gated;
    options.stream = stream;
    if (product.bias) options.bias = TensorView(bias.data(), DType::kF32, Shape{product.n});
    const Status status =
        Gemm(device, TensorView(a_data, DType::kF32, Shape{product.m, product.k}), *weights,
             MutableTensorView(c_data, DType::kF32, Shape{product.m, columns}), options);
    EXPECT_TRUE(status.ok()) << product.kernel << ": " << status.message();
    EXPECT_TRUE(device.Synchronize(stream).ok());
    const Status copied = on_host ? Status() : device_c->CopyTo(c.data(), bytes(c));
    EXPECT_TRUE(copied.ok()) << copied.message();
    return c;
  }

  void ExpectSameBits(const Product& product) {
    const std::vector<float> expected = Run(*simulator_, product, Place::kHost);
    for (const Place place : {Place::kHost, Place::kDevice}) {
      const std::vector<float> got = Run(*apple_, product, place);
      ASSERT_EQ(got.size(), expected.size());
      EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)), 0)
          << product.kernel << (place == Place::kHost ? " on the host" : " on the device");
    }
  }

  std::optional<Device> simulator_;
  std::optional<Device> apple_;
};

TEST_F(AppleProducts, HaveTheSimulatorsBits) {
  ExpectSameBits({.kernel = "marlin_gemv"});
  ExpectSameBits({.kernel = "marlin_gemv_wide", .format = Format::kU4, .m = 3, .bias = true});
  ExpectSameBits({.kernel = "marlin_gemm_fused_fp4", .m = 70});
  ExpectSameBits({.kernel = "marlin_gemm_staged", .format = Format::kNf4, .m = 66});
}

// One Run with several launches: partial sums in a workspace are cleared before and reduced after.
TEST_F(AppleProducts, OfSeveralLaunches) {
  ExpectSameBits({.kernel = "marlin_gemm_split_k", .m = 9, .k = 1040, .bias = true});
  ExpectSameBits({.kernel = "marlin_gemm_split_k", .m = 9, .k = 520, .gated = true});
  ExpectSameBits({.kernel = "marlin_gemm_fp4_striped", .m = 66, .k = 1040});
}

TEST_F(AppleProducts, OnUnknownFragments) {
  TheBehaviour().rotates_fragments = true;
  apple_ = OpenDevice("metal");
  const Product product = {.m = 66};
  const std::vector<float> a(static_cast<size_t>(product.m * product.k));
  std::vector<float> c(static_cast<size_t>(product.m * product.n));
  const Result<PreparedWeights> weights = Prepare(WeightsOf(product), *apple_);
  const Result<GemmPlan> plan =
      PlanGemm(*apple_, TensorView(a.data(), DType::kF32, Shape{product.m, product.k}), *weights,
               MutableTensorView(c.data(), DType::kF32, Shape{product.m, product.n}));
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->kernel(), "marlin_gemm_staged");
  ExpectSameBits({.kernel = "marlin_gemm_staged", .m = 66});
}

TEST_F(AppleProducts, OnQueuesOfTwoThreads) {
  const Product product = {.kernel = "marlin_gemm_split_k", .m = 9, .k = 520};
  const std::vector<float> expected = Run(*simulator_, product, Place::kHost);
  std::vector<std::thread> threads;
  std::array<std::vector<float>, 2> results;
  std::array<void*, 2> queues = {fake_gpu::NewQueue(false), nullptr};
  for (size_t t = 0; t < results.size(); ++t) {
    threads.emplace_back([&, t] { results[t] = Run(*apple_, product, Place::kDevice, queues[t]); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(results[0], expected);
  EXPECT_EQ(results[1], expected);
  fake_gpu::ReleaseQueue(queues[0]);
}

TEST_F(AppleProducts, DequantizeToo) {
  const Product product = {.format = Format::kInt3};
  const auto decode = [&](const Device& device) {
    const Result<PreparedWeights> weights = Prepare(WeightsOf(product), device);
    std::vector<float> out(static_cast<size_t>(product.k * product.n));
    EXPECT_TRUE(Dequantize(device, *weights,
                           MutableTensorView(out.data(), DType::kF32, Shape{product.k, product.n}))
                    .ok());
    return out;
  };
  EXPECT_EQ(decode(*apple_), decode(*simulator_));
}

// Opening a device compares one GEMM per kernel with the host.
TEST_F(AppleProducts, AreCheckedOnEveryKernel) {
  ASSERT_EQ(unsetenv("MARLIN_METAL_SELF_TEST"), 0);
  const int64_t before = TheLog().dispatches;
  apple_ = OpenDevice("metal");
  EXPECT_GT(TheLog().dispatches, before + 10);
  TheBehaviour().breaks_sums = true;
  const Result<Device> broken = Device::Open("metal");
  ASSERT_FALSE(broken.ok());
  EXPECT_EQ(broken.status().code(), Code::kUnsupported);
  EXPECT_THAT(broken.status().message(),
              testing::StartsWith("metal: self-test: marlin_gemv: out[0, 0] is "));
}

TEST_F(AppleProducts, OfALostDevice) {
  TheBehaviour().fails_from = TheLog().command_buffers;
  const Product product;
  const Result<PreparedWeights> weights = Prepare(WeightsOf(product), *apple_);
  const std::vector<float> a(static_cast<size_t>(product.k));
  std::vector<float> c(static_cast<size_t>(product.n));
  const auto run = [&] {
    return Gemm(*apple_, TensorView(a.data(), DType::kF32, Shape{1, product.k}), *weights,
                MutableTensorView(c.data(), DType::kF32, Shape{1, product.n}));
  };
  EXPECT_EQ(run().code(), Code::kDeviceLost);
  EXPECT_EQ(run().code(), Code::kDeviceLost);
  EXPECT_EQ(apple_->Synchronize().code(), Code::kDeviceLost);
  EXPECT_EQ(DeviceBuffer::Allocate(*apple_, 1).status().code(), Code::kDeviceLost);
}

}  // namespace
}  // namespace marlin
