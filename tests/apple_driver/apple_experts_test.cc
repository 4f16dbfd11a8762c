// The experts of a layer on Device::Open("metal") with the fake GPU and on "metal-sim": kernels
// that reach weights through addresses, and errors that come from Synchronize.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/split_mix64.h"
#include "fake_gpu.h"
#include "marlin/moe.h"
#include "marlin/quantize.h"
#include "objective_c.h"

namespace marlin {
namespace {

constexpr int64_t kHidden = 72;
constexpr int64_t kInner = 40;
constexpr int64_t kTokens = 150;  // With top_k 2 more than one block of the sort.
constexpr int64_t kTopK = 2;

std::vector<float> RandomFloats(int64_t count, uint64_t seed) {
  SplitMix64 random(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(random.Next() % 2048) / 1024.0F - 1.0F;
  return values;
}

/// A layer of three experts, one of which is not here, and the operands of a run.
class Layer {
 public:
  explicit Layer(const Device& device) : device_(device) {
    std::vector<Expert> experts(3);
    experts[0].gate = Matrix(kHidden, 2 * kInner, Format::kU4);
    experts[0].down = Matrix(kInner, kHidden, Format::kS8);
    experts[2].gate = Matrix(kHidden, kInner, Format::kNf4);
    experts[2].up = Matrix(kHidden, kInner, Format::kNf4);
    experts[2].down = Matrix(kInner, kHidden, Format::kFp4E2M1);
    set_ = *ExpertSet::Make(device, experts);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * 7 % 3);
  }

  ExpertsPlan Plan() const {
    ExpertsProblem problem{kTokens, kTopK, DType::kF32, DType::kF32};
    const Result<ExpertsPlan> plan = PlanExperts(device_, problem, set_);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    return *plan;
  }

  Status Run(const ExpertsPlan& plan, float* out, void* stream = nullptr) const {
    ExpertsArguments arguments;
    arguments.stream = stream;
    const Shape rows{kTokens, kHidden};
    const Shape selections{kTokens, kTopK};
    return plan.Run({x.data(), DType::kF32, rows}, {ids.data(), DType::kI32, selections},
                    {weights.data(), DType::kF32, selections}, {out, DType::kF32, rows}, arguments);
  }

  std::vector<float> x = RandomFloats(kTokens * kHidden, 1);
  std::vector<float> weights = RandomFloats(kTokens * kTopK, 2);
  std::vector<int32_t> ids = std::vector<int32_t>(static_cast<size_t>(kTokens * kTopK));

 private:
  ExpertMatrix Matrix(int64_t k, int64_t n, Format format) {
    const std::vector<float> dense = RandomFloats(k * n, ++seed_);
    QuantizeOptions options;
    options.format = format;
    options.group_size = 32;
    const auto quantized = Quantize({dense.data(), DType::kF32, {k, n}}, options);
    biases_.push_back(RandomFloats(n, ++seed_));
    ExpertMatrix matrix{*Prepare(*quantized, device_)};
    matrix.bias = TensorView(biases_.back().data(), DType::kF32, {n});
    return matrix;
  }

  Device device_;
  ExpertSet set_;
  uint64_t seed_ = 10;
  std::vector<std::vector<float>> biases_;
};

class AppleExperts : public testing::Test {
 protected:
  void SetUp() override {
    fake_gpu::Reset();
    ASSERT_EQ(setenv("MARLIN_METAL_SELF_TEST", "probe", 1), 0);
    apple_ = *Device::Open("metal");
  }
  void TearDown() override {
    ASSERT_EQ(unsetenv("MARLIN_METAL_SELF_TEST"), 0);
    apple_.reset();
    EXPECT_EQ(fake_objc::LivingObjects(), "");
  }

  std::optional<Device> apple_;
};

TEST_F(AppleExperts, HaveTheSimulatorsBits) {
  const auto run = [](const Device& device) {
    const Layer layer(device);
    std::vector<float> out(static_cast<size_t>(kTokens * kHidden), -7.0F);
    const Status status = layer.Run(layer.Plan(), out.data());
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(device.Synchronize().ok());
    return out;
  };
  EXPECT_EQ(run(*apple_), run(*Device::Open("metal-sim")));
}

// A barrier that is not there is found, whichever it is, with the kernels that it was between.
TEST_F(AppleExperts, NeedEveryBarrier) {
  constexpr int kRuns = 2;
  const Layer layer(*apple_);
  const ExpertsPlan plan = layer.Plan();
  const DeviceBuffer out = *DeviceBuffer::Allocate(*apple_, kTokens * kHidden * 4);
  const auto run = [&] {
    Status first;
    for (int i = 0; i < kRuns && first.ok(); ++i) {
      first = layer.Run(plan, static_cast<float*>(out.data()));
    }
    Status waited = apple_->Synchronize();
    return first.ok() ? waited : first;
  };
  const int64_t before = fake_gpu::TheLog().barriers;
  ASSERT_TRUE(run().ok());
  const int64_t barriers = fake_gpu::TheLog().barriers - before;
  EXPECT_GE(barriers, 10);
  fake_gpu::TheBehaviour().error = 2;  // MTLCommandBufferErrorTimeout: the device goes on.
  for (int64_t i = 0; i < barriers; ++i) {
    fake_gpu::TheBehaviour().drops_barrier = fake_gpu::TheLog().barriers + i;
    const Status status = run();
    EXPECT_EQ(status.code(), Code::kInternal) << i;
    EXPECT_THAT(status.message(), testing::ContainsRegex("no barrier between moe_.* and moe_"));
  }
  fake_gpu::TheBehaviour().drops_barrier = -1;
  EXPECT_TRUE(run().ok());
}

// Before macOS 15 each encoder names the weights.
TEST_F(AppleExperts, NameTheirWeightsWithoutResidencySets) {
  for (const bool sets : {true, false}) {
    fake_gpu::TheBehaviour().residency_sets = sets;
    apple_ = *Device::Open("metal");
    const Layer layer(*apple_);
    const DeviceBuffer out = *DeviceBuffer::Allocate(*apple_, kTokens * kHidden * 4);
    const Status run = layer.Run(layer.Plan(), static_cast<float*>(out.data()));
    EXPECT_TRUE(run.ok()) << run.message();
    EXPECT_TRUE(apple_->Synchronize().ok());
    EXPECT_EQ(fake_gpu::TheLog().used_resources > 0, !sets);
  }
}

// Opening a device compares a layer with the host.
TEST_F(AppleExperts, AreCheckedWhenTheDeviceOpens) {
  ASSERT_EQ(unsetenv("MARLIN_METAL_SELF_TEST"), 0);
  for (const char* const function : {"moe_expert_gemm_32x64", "moe_sum_experts", "moe_gate_up_1",
                                     "moe_expert_gemm_fp4", "moe_down_sum_1"}) {
    fake_gpu::TheBehaviour().breaks = function;
    const Result<Device> broken = Device::Open("metal");
    ASSERT_FALSE(broken.ok()) << function;
    EXPECT_EQ(broken.status().code(), Code::kUnsupported);
    EXPECT_THAT(broken.status().message(),
                testing::StartsWith("metal: self-test: experts: out[0, 0] is "));
  }
}

TEST_F(AppleExperts, TellOfWrongIdsWhenSynchronized) {
  Layer layer(*apple_);
  const ExpertsPlan plan = layer.Plan();
  const DeviceBuffer out = *DeviceBuffer::Allocate(*apple_, kTokens * kHidden * 4);
  void* const queue = fake_gpu::NewQueue(false);
  layer.ids[280] = 3;
  layer.ids[277] = -4;
  EXPECT_TRUE(layer.Run(plan, static_cast<float*>(out.data()), queue).ok());
  layer.ids[280] = layer.ids[277] = 0;
  EXPECT_TRUE(layer.Run(plan, static_cast<float*>(out.data())).ok());
  // The queue that has no wrong ids, then the one that has, once.
  const auto* const other = fake_gpu::NewQueue(false);
  EXPECT_TRUE(apple_->Synchronize(const_cast<void*>(other)).ok());
  const Status status = apple_->Synchronize(queue);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(status.message(), "ids: token 138, selection 1: -4 is not in 0..2");
  EXPECT_TRUE(apple_->Synchronize(queue).ok());
  EXPECT_TRUE(apple_->Synchronize().ok());
  fake_gpu::ReleaseQueue(queue);
  fake_gpu::ReleaseQueue(const_cast<void*>(other));
}

// A router that is wrong is not used, whichever of its kernels it is.
TEST_F(AppleExperts, HaveRoutersThatAreCheckedWhenTheDeviceOpens) {
  ASSERT_EQ(unsetenv("MARLIN_METAL_SELF_TEST"), 0);
  for (const std::string function : {"moe_router_topk", "moe_router_topk_fused"}) {
    fake_gpu::TheBehaviour().breaks = function;
    const Result<Device> broken = Device::Open("metal");
    ASSERT_FALSE(broken.ok()) << function;
    EXPECT_EQ(broken.status().code(), Code::kUnsupported);
    EXPECT_THAT(broken.status().message(), testing::StartsWith("metal: self-test: " + function +
                                                               ": token 0, selection 0 is "));
  }
}

TEST_F(AppleExperts, HaveRoutersThatTellOfLogitsWhenSynchronized) {
  constexpr int64_t kRows = 3;
  constexpr int64_t kColumns = 8;
  const DeviceBuffer memory = *DeviceBuffer::Allocate(*apple_, kRows * (kColumns + 2) * 4);
  auto* const logits = static_cast<float*>(memory.data());
  const MutableTensorView ids(logits + kRows * kColumns, DType::kI32, {kRows, 1});
  const MutableTensorView weights(logits + kRows * (kColumns + 1), DType::kF32, {kRows, 1});
  const auto route = [&] {
    return RouteTokens(*apple_, {logits, DType::kF32, {kRows, kColumns}}, {.top_k = 1}, ids,
                       weights);
  };
  for (int64_t i = 0; i < kRows * kColumns; ++i) logits[i] = static_cast<float>(i * 5 % 8);
  EXPECT_TRUE(route().ok());
  EXPECT_TRUE(apple_->Synchronize().ok());
  for (int64_t row = 0; row < kRows; ++row) EXPECT_EQ(ids.As<int32_t>()[row], 3);

  logits[2 * kColumns + 5] = std::nanf("");
  logits[kColumns + 6] = std::nanf("");
  EXPECT_TRUE(route().ok());
  const Status status = apple_->Synchronize();
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(status.message(), "logits: NaN at [1, 6] (token, expert)");
  EXPECT_TRUE(apple_->Synchronize().ok());
}

}  // namespace
}  // namespace marlin
