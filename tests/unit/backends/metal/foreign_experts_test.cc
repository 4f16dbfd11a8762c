// Experts whose launches a framework encodes: the image, the invented addresses, and the bits.
#include "backends/metal/moe/foreign_experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backends/metal/runtime/error_words.h"
#include "simulated_experts.h"

namespace marlin::metal::foreign_experts_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kHidden = 40;
constexpr int64_t kInner = 24;

/// A matrix of all experts.
struct Role {
  std::vector<QuantizedWeights> weights;
  std::vector<float> biases;

  std::vector<const QuantizedWeights*> pointers() const {
    std::vector<const QuantizedWeights*> all;
    for (const QuantizedWeights& each : weights) all.push_back(&each);
    return all;
  }
};

struct Roles {
  Role gate;
  Role up;
  Role down;
};

class ForeignExpertsTest : public SimulatedExperts {
 protected:
  static void SetUpTestSuite() {
    auto driver = OpenSimulatedDriver(&launches_);
    opened_ = driver.status();
    if (!opened_.ok()) return;
    driver_ = driver->get();  // The device's: kernels are compiled once.
    device_ = Internals::Make<Device>(
        std::make_shared<Device::Impl>(MakeMetalBackend(std::move(*driver))));
  }

  QuantizedWeights Random(int64_t experts, int64_t k, int64_t n, Format format) {
    std::vector<float> values(static_cast<size_t>(experts * k * n));
    for (float& value : values) value = static_cast<float>(random_() % 2048) / 1024.0F - 1.0F;
    QuantizeOptions options;
    options.format = format;
    options.group_size = 0;
    return *Quantize({values.data(), DType::kF32, {experts, k, n}}, options);
  }

  Role Stack(int64_t experts, int64_t k, int64_t n, Format format, bool biased) {
    Role role;
    role.weights.push_back(Random(experts, k, n, format));
    for (int64_t i = 0; biased && i < experts * n; ++i) {
      role.biases.push_back(static_cast<float>(random_() % 16) / 8.0F);
    }
    return role;
  }

  Roles Stacks(int64_t experts, bool biased) {
    return {Stack(experts, kHidden, kInner, Format::kFp4E2M1, biased),
            Stack(experts, kHidden, kInner, Format::kFp4E2M1, biased),
            Stack(experts, kInner, kHidden, Format::kU4, biased)};
  }

  static Result<std::shared_ptr<ForeignExperts>> Try(const Roles& roles) {
    const auto gate = roles.gate.pointers();
    const auto up = roles.up.pointers();
    const auto down = roles.down.pointers();
    return ForeignExperts::Make({{gate, roles.gate.biases},
                                 {up, roles.up.biases},
                                 {down, roles.down.biases},
                                 {Activation::kSilu}});
  }

  struct Selections {
    ForeignExpertsCall call;
    std::vector<float> x;
    std::vector<int32_t> ids;
  };

  Selections Select(int64_t rows, int64_t experts) {
    Selections made;
    made.call.rows = rows;
    for (int64_t i = 0; i < rows; ++i) {
      made.ids.push_back(static_cast<int32_t>(random_() % static_cast<uint64_t>(experts)));
    }
    for (int64_t i = 0; i < rows * kHidden; ++i) {
      made.x.push_back(static_cast<float>(random_() % 64) / 32.0F - 1.0F);
    }
    return made;
  }

  /// Encodes the launches as a framework would; errors_ is what they report.
  std::vector<float> RunForeign(ForeignExperts& experts, const Selections& selections,
                                const PassLimits& limits = {}) {
    auto image = *AllocateMemory<std::byte>(*driver_, experts.image_bytes());
    experts.WriteImage(image.get(), driver_->AddressOf(image.get()));
    ForeignExpertLaunches planned = experts.Launches(selections.call, driver_->Shape(), limits);
    passes_ = planned.passes;
    std::vector<float> ones(selections.ids.size(), 1.0F);
    std::vector<float> out(selections.ids.size() * kHidden, -7.0F);
    std::vector<float> workspace(static_cast<size_t>(planned.workspace_bytes) / sizeof(float));
    // Bytes before x make it begin where the call says.
    std::vector<float> x(selections.x);
    x.insert(x.begin(), selections.call.aligned ? 4 : 1, 0.0F);
    errors_.assign(static_cast<size_t>(planned.passes), {});
    const std::vector<void*> arrays = {
        nullptr,
        image.get(),
        x.data() + (selections.call.aligned ? 4 : 1),
        const_cast<int32_t*>(selections.ids.data()),
        ones.data(),
        out.data(),
        workspace.data(),
        errors_.data(),
    };
    for (KernelLaunch& launch : planned.launches) {
      for (KernelBuffer& buffer : launch.buffers) {
        const ForeignPlace place = PlaceOf(buffer.data);
        EXPECT_NE(place.operand, ForeignOperand::kNone) << launch.function << " " << buffer.index;
        buffer.data =
            static_cast<std::byte*>(arrays.at(static_cast<size_t>(place.operand))) + place.offset;
      }
      const MemoryRange range{image.get(), experts.image_bytes()};
      launch.reached = driver_->Reach({&range, 1});
    }
    const Status status = driver_->Run(planned.launches, nullptr);
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  }

  /// The same experts on the device, every row a token of one selection.
  std::vector<float> OnDevice(const Roles& roles, const Selections& selections) {
    std::vector<Expert> experts;
    std::vector<PreparedWeights> kept;
    const auto add = [&](const Role& role, ExpertMatrix Expert::*part) {
      size_t at = 0;
      for (const QuantizedWeights& weights : role.weights) {
        const PreparedWeights ready = *Prepare(weights, *device_);
        for (int64_t index = 0; index < weights.spec.experts; ++index, ++at) {
          if (experts.size() <= at) experts.resize(at + 1);
          (experts[at].*part).weights = ready;
          (experts[at].*part).index = index;
          const int64_t n = weights.spec.n;
          if (role.biases.empty()) continue;
          (experts[at].*part).bias =
              TensorView(role.biases.data() + static_cast<int64_t>(at) * n, DType::kF32, {n});
        }
      }
    };
    add(roles.gate, &Expert::gate);
    add(roles.up, &Expert::up);
    add(roles.down, &Expert::down);
    const auto set = ExpertSet::Make(*device_, experts, {});
    EXPECT_TRUE(set.ok()) << set.status().message();
    Layer layer;
    layer.options.hidden = kHidden;
    layer.set = *set;
    const auto rows = static_cast<int64_t>(selections.ids.size());
    Batch batch{rows, 1, selections.x, selections.ids, std::vector<float>(rows, 1.0F)};
    if (selections.call.one_row) {
      batch.x.clear();
      for (int64_t i = 0; i < rows; ++i) {
        batch.x.insert(batch.x.end(), selections.x.begin(), selections.x.begin() + kHidden);
      }
    }
    ExpertsProblem problem{rows, 1, DType::kF32, DType::kF32};
    return Run(layer, batch, problem);
  }

  void Compare(const Roles& roles, const Selections& selections, const PassLimits& limits = {}) {
    auto experts = Try(roles);
    ASSERT_TRUE(experts.ok()) << experts.status().message();
    EXPECT_EQ(RunForeign(**experts, selections, limits), OnDevice(roles, selections));
    for (const ErrorWords::Word& error : errors_) {
      EXPECT_EQ(error.selection, kernels::kNoSelection);
    }
  }

  inline static Driver* driver_ = nullptr;
  std::vector<ErrorWords::Word> errors_;
  int64_t passes_ = 0;
};

TEST_F(ForeignExpertsTest, HaveTheBitsOfTheDevice) {
  for (const bool biased : {false, true}) {
    const Roles roles = Stacks(3, biased);
    for (const int64_t rows : {1, 6, 40}) Compare(roles, Select(rows, 3));
  }
}

TEST_F(ForeignExpertsTest, HaveMatricesOfTheirOwn) {
  Roles roles;
  for (const Format format : {Format::kFp4E2M1, Format::kU4, Format::kNf3, Format::kBf16}) {
    roles.gate.weights.push_back(Random(1, kHidden, 2 * kInner, format));
    roles.down.weights.push_back(Random(1, kInner, kHidden, format));
  }
  Compare(roles, Select(12, 4));
}

TEST_F(ForeignExpertsTest, ShareOneRow) {
  Selections selections = Select(5, 3);
  selections.call.one_row = true;
  selections.x.resize(kHidden);
  Compare(Stacks(3, false), selections);
}

TEST_F(ForeignExpertsTest, TakeRowsAtAnyAddress) {
  Selections selections = Select(7, 3);
  selections.call.aligned = false;
  Compare(Stacks(3, false), selections);
}

TEST_F(ForeignExpertsTest, RunPassesOverManyRows) {
  Compare(Stacks(3, true), Select(11, 3), {.operations = 4 * 6 * kHidden * kInner});
  EXPECT_EQ(passes_, 3);
}

TEST_F(ForeignExpertsTest, ReportAWrongIdAndRunTheOthers) {
  const Roles roles = Stacks(3, false);
  Selections selections = Select(4, 3);
  const std::vector<float> right = OnDevice(roles, selections);
  selections.ids[2] = 3;
  auto experts = Try(roles);
  ASSERT_TRUE(experts.ok());
  const std::vector<float> out = RunForeign(**experts, selections);
  EXPECT_EQ(errors_.front(), (ErrorWords::Word{2, 3}));
  EXPECT_TRUE(std::equal(out.begin(), out.begin() + 2 * kHidden, right.begin()));
  EXPECT_EQ(out[2 * kHidden], 0.0F);
  EXPECT_TRUE(std::equal(out.end() - kHidden, out.end(), right.end() - kHidden));
}

TEST_F(ForeignExpertsTest, NameWhatDoesNotMatch) {
  const Roles roles = Stacks(3, true);
  const auto message = [](const Roles& wrong) {
    return std::string(Try(wrong).status().message());
  };
  EXPECT_THAT(message({}), HasSubstr("there are none"));
  Roles wrong = roles;
  wrong.down = Stack(2, kInner, kHidden, Format::kU4, false);
  EXPECT_THAT(message(wrong), HasSubstr("of different numbers"));
  wrong = roles;
  wrong.up = Stack(3, kHidden, kInner - 8, Format::kU4, false);
  EXPECT_THAT(message(wrong), HasSubstr("the shapes of expert 0 do not match"));
  wrong = roles;
  wrong.up = {};
  EXPECT_THAT(message(wrong), HasSubstr("the shapes of expert 0 do not match"));
  wrong = roles;
  wrong.gate.biases.pop_back();
  EXPECT_THAT(message(wrong), HasSubstr("gate_bias: expected [3, 24], got 71 values"));
}

}  // namespace
}  // namespace marlin::metal::foreign_experts_test
