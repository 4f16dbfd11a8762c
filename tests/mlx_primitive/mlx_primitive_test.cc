// The GPU side of MLX's primitive: on the fake of MLX's encoder and the simulator its bits must
// equal those of the device "metal-sim".
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mlx/mlx.h>

#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "backends/metal/gemm/foreign_product.h"
#include "base/split_mix64.h"
#include "fake_gpu.h"
#include "marlin/decoder.h"
#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/quantize.h"
#include "mlx/look_up.h"
#include "mlx_metal_stand_in.h"
#include "strips_product.h"

namespace marlin::python {
namespace {

namespace mx = mlx::core;

struct Problem {
  Format format = Format::kFp4E2M1;
  int m = 1;
  int n = 72;
  int k = 320;
  bool bias = false;
  const char* kernel = "";
  int experts = 1;
};

std::vector<float> RandomFloats(int count, uint64_t seed) {
  SplitMix64 random(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(random.Next() % 512) / 256 - 1;
  return values;
}

mx::array Bytes(const metal::StripPart& part, int experts) {
  const auto row = static_cast<int>(part.bytes);
  return mx::array(part.data, {experts, row}, mx::uint8);
}

class MlxPrimitiveTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fake_gpu::Reset();
    fake_gpu::TheBehaviour().takes_serial = true;
    auto device = Device::Open("metal-sim");
    if (!device.ok()) GTEST_SKIP() << device.status().message();
    device_ = std::make_unique<Device>(*std::move(device));
  }

  QuantizedWeights Weights(const Problem& p) {
    const std::vector<float> dense = RandomFloats(p.experts * p.k * p.n, 1);
    QuantizeOptions options;
    options.format = p.format;
    options.group_size = 32;
    auto weights = Quantize(TensorView(dense.data(), DType::kF32, {p.experts, p.k, p.n}), options);
    EXPECT_TRUE(weights.ok()) << weights.status().message();
    return *std::move(weights);
  }

  /// Evaluates the primitive as MLX would, with contiguous inputs.
  std::vector<float> Primitive(const Problem& p, const QuantizedWeights& weights, int expert) {
    const auto strips = *metal::PrepareForeign(weights);
    auto made = std::make_shared<MlxWeights>();
    made->k = p.k;
    made->n = p.n;
    made->experts = p.experts;
    made->metal = MakeMetalProduct(strips);
    made->plans = MakeGpuPlans();
    made->shape = {2, true};
    const mx::Stream stream = mx::default_stream(mx::Device::cpu);
    std::vector<mx::array> inputs = {mx::array(x_.data(), {p.m, p.k}, mx::float32)};
    for (const metal::StripPart& part :
         {strips->codes(expert), strips->scales(expert), strips->extras(expert), strips->table()}) {
      inputs.push_back(Bytes(part.bytes > 0 ? part : strips->codes(expert), 1));
    }
    if (p.bias) inputs.emplace_back(bias_.data(), mx::Shape{p.n}, mx::float32);
    mx::array out(mx::Shape{p.m, p.n}, mx::float32, nullptr, {});
    Product product(stream, made, {expert, p.kernel}, p.bias);
    mlx_metal::Evaluate([&] { product.eval_gpu(inputs, out); });
    return std::vector<float>(out.data<float>(), out.data<float>() + out.size());
  }

  std::vector<float> Ours(const Problem& p, const QuantizedWeights& weights, int expert) {
    std::vector<float> out(static_cast<size_t>(p.m * p.n));
    auto ready = Prepare(weights, *device_);
    EXPECT_TRUE(ready.ok()) << ready.status().message();
    GemmOptions options;
    options.expert = expert;
    options.kernel = p.kernel;
    if (p.bias) options.bias = TensorView(bias_.data(), DType::kF32, {p.n});
    const Status status = Gemm(*device_, TensorView(x_.data(), DType::kF32, {p.m, p.k}), *ready,
                               MutableTensorView(out.data(), DType::kF32, {p.m, p.n}), options);
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  }

  void Compare(const Problem& p, int expert = 0) {
    x_ = RandomFloats(p.m * p.k, 2);
    bias_ = RandomFloats(p.n, 3);
    const QuantizedWeights weights = Weights(p);
    const std::vector<float> got = Primitive(p, weights, expert);
    const std::vector<float> want = Ours(p, weights, expert);
    ASSERT_EQ(got.size(), want.size());
    EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)), 0)
        << FormatName(p.format) << " m " << p.m << " " << p.kernel;
  }

  std::unique_ptr<Device> device_;
  std::vector<float> x_;
  std::vector<float> bias_;
};

TEST_F(MlxPrimitiveTest, HasTheBitsOfTheDevice) {
  for (const Format format : {Format::kFp4E2M1, Format::kU4, Format::kNf3, Format::kBf16}) {
    for (const int m : {1, 5, 20, 70}) Compare({format, m, 72, 320, m == 5});
  }
}

TEST_F(MlxPrimitiveTest, RunsSeveralLaunchesInOrder) {
  for (const char* kernel : {"marlin_gemm_split_k", "marlin_gemm_fp4_striped"}) {
    Compare({Format::kFp4E2M1, 40, 70, 2048, true, kernel});
  }
  EXPECT_GE(fake_gpu::TheLog().dispatches, 5);
}

TEST_F(MlxPrimitiveTest, TakesAnExpertsWeights) {
  for (const int expert : {0, 2}) Compare({Format::kU4, 3, 24, 96, false, "", 3}, expert);
}

TEST_F(MlxPrimitiveTest, LooksUpRows) {
  const Problem p{Format::kU4, 3, 72, 160};
  const QuantizedWeights weights = Weights(p);
  const std::vector<int32_t> ids = {71, 0, 8};
  auto made = std::make_shared<MlxWeights>();
  made->k = p.k;
  made->n = p.n;
  const auto strips = *metal::PrepareForeign(weights);
  made->metal = MakeMetalProduct(strips);
  std::vector<mx::array> inputs = {mx::array(ids.data(), {p.m}, mx::int32)};
  for (const metal::StripPart& part :
       {strips->codes(0), strips->scales(0), strips->extras(0), strips->table()}) {
    inputs.push_back(Bytes(part.bytes > 0 ? part : strips->codes(0), 1));
  }
  mx::array out(mx::Shape{p.m, p.k}, mx::float32, nullptr, {});
  LookUp look_up(mx::default_stream(mx::Device::cpu), made);
  mlx_metal::Evaluate([&] { look_up.eval_gpu(inputs, out); });
  const std::vector<float> got(out.data<float>(), out.data<float>() + out.size());

  std::vector<float> want(got.size());
  const Status status = LookUpRows(*device_, *Prepare(weights, *device_), ids,
                                   MutableTensorView(want.data(), DType::kF32, {p.m, p.k}));
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(got, want);
}

TEST_F(MlxPrimitiveTest, RefusesWeightsOfTheCpu) {
  auto made = std::make_shared<MlxWeights>();
  mx::array out(mx::Shape{1, 8}, mx::float32, nullptr, {});
  Product product(mx::default_stream(mx::Device::cpu), made, {}, false);
  EXPECT_THROW(product.eval_gpu({out}, out), std::runtime_error);
  EXPECT_THROW(product.eval_cpu({out}, out), std::runtime_error);
}

}  // namespace
}  // namespace marlin::python
