// The GPU side of MLX's experts: on the fake of MLX's encoder and the simulator it must have
// the bits of the device "metal-sim".
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mlx/mlx.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "backends/metal/moe/foreign_experts.h"
#include "base/split_mix64.h"
#include "fake_gpu.h"
#include "marlin/device.h"
#include "marlin/moe.h"
#include "marlin/quantize.h"
#include "mlx/experts.h"
#include "mlx_metal_stand_in.h"
#include "strips_product.h"

namespace marlin::python {
namespace {

namespace mx = mlx::core;

constexpr int kExperts = 5;
constexpr int kHidden = 72;
constexpr int kInner = 48;

class MlxExpertsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fake_gpu::Reset();
    fake_gpu::TheBehaviour().takes_serial = true;
    auto device = Device::Open("metal-sim");
    if (!device.ok()) GTEST_SKIP() << device.status().message();
    device_ = std::make_unique<Device>(*std::move(device));
    for (const auto& [k, n, format] : {std::tuple{kHidden, kInner, Format::kFp4E2M1},
                                       {kHidden, kInner, Format::kFp4E2M1},
                                       {kInner, kHidden, Format::kU4}}) {
      weights_.push_back(Random(k, n, format));
    }
  }

  QuantizedWeights Random(int k, int n, Format format) {
    const std::vector<float> values = Floats(kExperts * k * n);
    QuantizeOptions options;
    options.format = format;
    options.group_size = 0;
    return *Quantize(TensorView(values.data(), DType::kF32, {kExperts, k, n}), options);
  }

  std::vector<float> Floats(int count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = static_cast<float>(random_.Next() % 512) / 256 - 1;
    return values;
  }

  std::shared_ptr<const MlxExperts> OnGpu() {
    const std::vector<const QuantizedWeights*> gate = {&weights_[0]};
    const std::vector<const QuantizedWeights*> up = {&weights_[1]};
    const std::vector<const QuantizedWeights*> down = {&weights_[2]};
    auto foreign = metal::ForeignExperts::Make({{gate, {}}, {up, {}}, {down, {}}});
    EXPECT_TRUE(foreign.ok()) << foreign.status().message();
    auto made = std::make_shared<MlxExperts>();
    made->hidden = kHidden;
    made->experts = kExperts;
    MoveToGpu(MakeMetalExperts(*foreign), {2, true}, made.get());
    return made;
  }

  /// Evaluates the primitive as MLX would, with contiguous inputs.
  static std::vector<float> Run(const std::shared_ptr<const MlxExperts>& experts,
                                const std::vector<float>& x, const std::vector<int32_t>& ids) {
    const auto rows = static_cast<int>(x.size()) / kHidden;
    const auto selections = static_cast<int>(ids.size());
    const mx::Stream stream = mx::default_stream(mx::Device::cpu);
    const std::vector<mx::array> inputs = {mx::array(x.data(), {rows, kHidden}, mx::float32),
                                           mx::array(ids.data(), {selections}, mx::int32),
                                           *experts->image};
    mx::array out(mx::Shape{selections, kHidden}, mx::float32, nullptr, {});
    Experts primitive(stream, experts);
    mlx_metal::Evaluate([&] { primitive.eval_gpu(inputs, out); });
    return std::vector<float>(out.data<float>(), out.data<float>() + out.size());
  }

  std::vector<float> OnDevice(const std::vector<float>& x, const std::vector<int32_t>& ids) {
    std::vector<Expert> experts(kExperts);
    const auto place = [&](const QuantizedWeights& weights, ExpertMatrix Expert::*part) {
      const PreparedWeights ready = *Prepare(weights, *device_);
      for (int64_t e = 0; e < kExperts; ++e) {
        (experts[static_cast<size_t>(e)].*part).weights = ready;
        (experts[static_cast<size_t>(e)].*part).index = e;
      }
    };
    place(weights_[0], &Expert::gate);
    place(weights_[1], &Expert::up);
    place(weights_[2], &Expert::down);
    const auto set = *ExpertSet::Make(*device_, experts, {});
    const auto rows = static_cast<int64_t>(ids.size());
    const auto plan = *PlanExperts(*device_, {rows, 1, DType::kF32, DType::kF32}, set);
    std::vector<float> out(ids.size() * kHidden);
    const std::vector<float> ones(ids.size(), 1.0F);
    const Status status = plan.Run(TensorView(x.data(), DType::kF32, {rows, kHidden}),
                                   TensorView(ids.data(), DType::kI32, {rows, 1}),
                                   TensorView(ones.data(), DType::kF32, {rows, 1}),
                                   MutableTensorView(out.data(), DType::kF32, {rows, kHidden}));
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  }

  SplitMix64 random_{9};
  std::unique_ptr<Device> device_;
  std::vector<QuantizedWeights> weights_;
};

TEST_F(MlxExpertsTest, HaveTheBitsOfTheDevice) {
  const auto experts = OnGpu();
  for (const int rows : {2, 9, 40}) {
    std::vector<int32_t> ids;
    for (int i = 0; i < rows; ++i) ids.push_back(static_cast<int32_t>(random_.Next() % kExperts));
    const std::vector<float> x = Floats(rows * kHidden);
    EXPECT_EQ(Run(experts, x, ids), OnDevice(x, ids)) << rows;
  }
}

TEST_F(MlxExpertsTest, SelectSeveralForOneTokenWithoutACopy) {
  const auto experts = OnGpu();
  const std::vector<float> x = Floats(kHidden);
  const std::vector<int32_t> ids = {3, 0, 4, 3};
  std::vector<float> rows;
  for (size_t i = 0; i < ids.size(); ++i) rows.insert(rows.end(), x.begin(), x.end());
  EXPECT_EQ(Run(experts, x, ids), OnDevice(rows, ids));
}

TEST_F(MlxExpertsTest, PlanAShapeOnce) {
  const auto experts = OnGpu();
  const std::vector<float> x = Floats(kHidden);
  Run(experts, x, {1, 2});
  const int64_t dispatches = fake_gpu::TheLog().dispatches;
  EXPECT_LE(dispatches, 4);  // Sort, gate and up with their activation, down, sum.
  const int64_t sources = fake_gpu::TheLog().sources;
  Run(experts, x, {0, 4});
  EXPECT_EQ(fake_gpu::TheLog().dispatches, 2 * dispatches);
  EXPECT_EQ(fake_gpu::TheLog().sources, sources);
}

TEST_F(MlxExpertsTest, ReportAWrongIndexByTheNextCall) {
  const auto experts = OnGpu();
  const std::vector<float> x = Floats(kHidden);
  Run(experts, x, {1, kExperts});
  try {
    Run(experts, x, {1, 2});
    ADD_FAILURE() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_THAT(error.what(),
                ::testing::HasSubstr("expert 5 at selection 1, which is not in 0..4"));
  }
  Run(experts, x, {1, 2});
}

TEST_F(MlxExpertsTest, LeaveTheResidencySetWithTheirMemory) {
  const int64_t before = fake_gpu::TheLog().resident;
  {
    const auto experts = OnGpu();
    EXPECT_EQ(fake_gpu::TheLog().resident, before + 1);
  }
  EXPECT_EQ(fake_gpu::TheLog().resident, before);
}

TEST_F(MlxExpertsTest, RefuseExpertsOfAnotherDevice) {
  auto made = std::make_shared<MlxExperts>();
  mx::array out(mx::Shape{1, 8}, mx::float32, nullptr, {});
  Experts primitive(mx::default_stream(mx::Device::cpu), made);
  EXPECT_THROW(primitive.eval_gpu({out, out}, out), std::runtime_error);
  EXPECT_THROW(primitive.eval_cpu({out, out}, out), std::runtime_error);
}

TEST_F(MlxExpertsTest, NeedMacOs15) {
  fake_gpu::TheBehaviour().residency_sets = false;
  EXPECT_THAT(WhyNoGpuExperts(), ::testing::HasSubstr("needs macOS 15"));
  EXPECT_THROW(OnGpu(), std::runtime_error);
}

}  // namespace
}  // namespace marlin::python
