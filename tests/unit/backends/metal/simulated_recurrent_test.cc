// The kernels of recurrent mixers in the simulator: results, states and errors of the CPU, and what
// is launched.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <list>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "backends/cpu/cpu_backend.h"
#include "backends/metal/metal_backend.h"
#include "backends/metal/runtime/simulated_driver.h"
#include "base/scalars.h"
#include "marlin/recurrent.h"
#include "ops/device/device.h"

namespace marlin::metal::simulated_recurrent_test {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kSlabPages = 2;
constexpr int64_t kFirstElement = 32;

/// States in two slabs of a device, of which a third between them is not allocated.
class Pages {
 public:
  Pages(const Device& device, int64_t elements) : stride_(elements + 64) {
    for (size_t i = 0; i < 2; ++i) {
      memory_.push_back(*DeviceBuffer::Allocate(device, kSlabPages * stride_ * 4));
      auto* const floats = static_cast<float*>(memory_.back().data());
      for (int64_t e = 0; e < kSlabPages * stride_; ++e) {
        floats[e] = std::sin(static_cast<float>(e + 1000 * static_cast<int64_t>(i)));
      }
      slabs_[2 * i] = floats;
    }
  }
  RecurrentStates states() const { return {slabs_, kSlabPages, stride_, kFirstElement}; }
  std::vector<float> Elements() const {
    std::vector<float> all;
    for (const DeviceBuffer& slab : memory_) {
      const auto* const floats = static_cast<const float*>(slab.data());
      all.insert(all.end(), floats, floats + kSlabPages * stride_);
    }
    return all;
  }

 private:
  int64_t stride_;
  std::vector<DeviceBuffer> memory_;
  void* slabs_[3] = {};
};

/// The rows of a step: three sequences, of which the second has none that takes part.
struct Rows {
  std::vector<int32_t> positions = {0, 1, -1, 2, -1, 0, 7, 8, 9, 10, 11};
  std::vector<int32_t> first_rows = {0, 4, 6, 11};
  std::vector<int32_t> pages = {-1, 0, 1, 1, 4, 5};

  Rows() { positions[5] = -1; }
  RecurrentRows views() const {
    const auto sequences = static_cast<int64_t>(first_rows.size()) - 1;
    return {{positions.data(), DType::kI32, {count()}},
            {first_rows.data(), DType::kI32, {sequences + 1}},
            {pages.data(), DType::kI32, {sequences, 2}}};
  }
  int64_t count() const { return static_cast<int64_t>(positions.size()); }
};

/// Numbers for operands, kept for a test.
class Numbers {
 public:
  TensorView Make(const Shape& shape, float deviation = 1.0F) {
    std::normal_distribution<float> normal(0.0F, deviation);
    values_.emplace_back(static_cast<size_t>(shape.ElementCount()));
    for (float& value : values_.back()) value = normal(random_);
    return {values_.back().data(), DType::kF32, shape};
  }

 private:
  std::mt19937 random_{3};
  std::list<std::vector<float>> values_;
};

class SimulatedRecurrent : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto driver = OpenSimulatedDriver(&launches_);
    opened_ = driver.status();
    if (!opened_.ok()) return;
    auto impl = std::make_shared<Device::Impl>(MakeMetalBackend(std::move(*driver)));
    impl->AddHost(*cpu::OpenCpu({.threads = 1}));
    device_ = Internals::Make<Device>(std::move(impl));
    cpu_ = *Device::Open("cpu", {.threads = 1});
  }
  static void TearDownTestSuite() { device_.reset(); }
  void SetUp() override {
    if (!opened_.ok()) GTEST_SKIP() << opened_.message();
    launches_.clear();
  }

  /// Runs an operation on both devices, and compares results and states.
  template <typename Run>
  static void Compare(const Shape& out_shape, DType type, int64_t state_elements, const Rows& rows,
                      const Run& run) {
    const auto run_on = [&](const Device& device, std::vector<float>* out,
                            std::vector<float>* states) {
      const Pages pages(device, state_elements);
      std::vector<float> memory(static_cast<size_t>(out_shape.ElementCount()), 77.0F);
      const MutableTensorView view(memory.data(), type, out_shape);
      Status status = run(device, pages.states(), view);
      if (status.ok()) status = device.Synchronize();
      for (int64_t i = 0; i < out_shape.ElementCount(); ++i) {
        out->push_back(type == DType::kF32 ? view.As<float>()[i]
                                           : Bf16ToFloat(view.As<uint16_t>()[i]));
      }
      *states = pages.Elements();
      return status;
    };
    std::vector<float> got;
    std::vector<float> want;
    std::vector<float> got_states;
    std::vector<float> want_states;
    const Status of_host = run_on(*cpu_, &want, &want_states);
    const Status of_device = run_on(*device_, &got, &got_states);
    ASSERT_EQ(of_device.message(), of_host.message());
    if (!of_host.ok()) return;
    const double unit = type == DType::kF32 ? 0x1p-16 : 0x1p-7;
    const int64_t width = out_shape.ElementCount() / rows.count();
    for (size_t i = 0; i < want.size(); ++i) {
      const size_t row = i / static_cast<size_t>(width);
      if (rows.positions[row] < 0) {
        EXPECT_EQ(got[i], 0.0F) << row;
      } else {
        ASSERT_NEAR(got[i], want[i], 1e-5 + unit * std::abs(double{want[i]})) << i;
      }
    }
    for (size_t i = 0; i < want_states.size(); ++i) {
      ASSERT_NEAR(got_states[i], want_states[i], 1e-5 * (1.0 + std::abs(double{want_states[i]})))
          << i;
    }
  }

  static std::vector<std::string> Functions() {
    std::vector<std::string> names;
    for (const SimulatedLaunch& launch : launches_) names.push_back(launch.function);
    return names;
  }

  static Status Delta(const Device& device, const GatedDeltaSizes& sizes, const Rows& rows,
                      const RecurrentStates& states, const MutableTensorView& out) {
    Numbers numbers;
    const int64_t count = rows.count();
    const int64_t group = sizes.value_heads / sizes.key_heads;
    const Shape of_keys{count, sizes.key_heads, sizes.key_dim};
    const Shape of_values{count, sizes.key_heads, group * sizes.value_dim};
    const Shape of_heads{count, sizes.key_heads, group};
    const GatedDeltaInputs inputs{numbers.Make(of_keys),   numbers.Make(of_keys),
                                  numbers.Make(of_values), numbers.Make(of_values),
                                  numbers.Make(of_heads),  numbers.Make(of_heads, 3.0F)};
    const GatedDeltaWeights weights{numbers.Make({sizes.channels(), sizes.conv_width}, 0.6F),
                                    numbers.Make({sizes.value_heads}),
                                    numbers.Make({sizes.value_heads}),
                                    numbers.Make({sizes.value_dim}),
                                    1e-6F,
                                    sizes};
    return GatedDelta(device, inputs, weights, rows.views(), states, out);
  }

  static inline std::vector<SimulatedLaunch> launches_;
  static inline std::optional<Device> device_;
  static inline std::optional<Device> cpu_;
  static inline Status opened_;
};

TEST_F(SimulatedRecurrent, GatedDeltaNetsAreThoseOfTheHost) {
  const Rows rows;
  for (const GatedDeltaSizes& sizes :
       {GatedDeltaSizes{2, 4, 40, 37, 4}, GatedDeltaSizes{1, 1, 5, 64, 1},
        GatedDeltaSizes{1, 2, 130, 6, 7}}) {
    const Shape out{rows.count(), sizes.value_heads, sizes.value_dim};
    const auto run = [&](const Device& device, const RecurrentStates& states,
                         const MutableTensorView& view) {
      return Delta(device, sizes, rows, states, view);
    };
    Compare(out, sizes.key_dim == 40 ? DType::kBf16 : DType::kF32, sizes.state_elements(), rows,
            run);
  }
  EXPECT_THAT(Functions(), ElementsAre("recurrent_mix", "recurrent_delta_2", "recurrent_finish",
                                       "recurrent_mix", "recurrent_delta_1", "recurrent_finish",
                                       "recurrent_mix", "recurrent_delta_8", "recurrent_finish"));
}

TEST_F(SimulatedRecurrent, Mamba2IsThatOfTheHost) {
  const Rows rows;
  const Mamba2Sizes sizes{4, 2, 33, 70, 3};
  for (int variant = 0; variant < 3; ++variant) {
    const auto run = [&](const Device& device, const RecurrentStates& states,
                         const MutableTensorView& view) {
      Numbers numbers;
      const int64_t count = rows.count();
      const Shape of_values{count, sizes.heads, sizes.head_dim};
      const Shape of_keys{count, sizes.groups, sizes.state_size};
      const Mamba2Inputs inputs{numbers.Make(of_values), numbers.Make(of_values),
                                numbers.Make(of_keys), numbers.Make(of_keys),
                                numbers.Make({count, sizes.heads}, 3.0F)};
      Mamba2Weights weights;
      weights.conv = numbers.Make({sizes.channels(), sizes.conv_width}, 0.6F);
      if (variant != 1) weights.conv_bias = numbers.Make({sizes.channels()});
      weights.log_decay = numbers.Make({sizes.heads});
      weights.step_bias = numbers.Make({sizes.heads});
      weights.skip = numbers.Make({sizes.heads});
      if (variant != 1) weights.norm = numbers.Make({sizes.features()});
      weights.norm_before_gate = variant == 2;
      if (variant == 2) weights.max_step = 0.7F;
      weights.min_step = 0.01F;
      weights.sizes = sizes;
      return Mamba2(device, inputs, weights, rows.views(), states, view);
    };
    Compare({rows.count(), sizes.heads, sizes.head_dim}, DType::kF32, sizes.state_elements(), rows,
            run);
  }
}

TEST_F(SimulatedRecurrent, ShortConvolutionsAreThoseOfTheHost) {
  const Rows rows;
  const ShortConvolutionSizes sizes{300, 4};
  const auto run = [&](const Device& device, const RecurrentStates& states,
                       const MutableTensorView& view) {
    Numbers numbers;
    const Shape shape{rows.count(), sizes.channels};
    const ShortConvolutionInputs inputs{numbers.Make(shape), numbers.Make(shape),
                                        numbers.Make(shape)};
    const ShortConvolutionWeights weights{numbers.Make({sizes.channels, sizes.conv_width}),
                                          numbers.Make({sizes.channels}), sizes};
    return ShortConvolution(device, inputs, weights, rows.views(), states, view);
  };
  Compare({rows.count(), sizes.channels}, DType::kF32, sizes.state_elements(), rows, run);
  EXPECT_THAT(Functions(), ElementsAre("short_convolution", "short_convolution_windows"));
}

TEST_F(SimulatedRecurrent, ReportsErrors) {
  const GatedDeltaSizes sizes{1, 1, 8, 8, 2};
  const auto both = [&](const Rows& rows) {
    const auto run = [&](const Device& device, const RecurrentStates& states,
                         const MutableTensorView& view) {
      return Delta(device, sizes, rows, states, view);
    };
    Compare({rows.count(), 1, 8}, DType::kF32, sizes.state_elements(), rows, run);
  };
  Rows rows;
  rows.pages = {-1, 0, 1, 1, 2, 5};
  both(rows);
  rows.pages = {-1, 0, -1, -1, 0, 9};
  both(rows);
  rows.pages = {-1, -1, 1, 1, -2, 5};
  both(rows);
  rows.first_rows = {0, 6, 4, 11};
  both(rows);
  rows.first_rows = {1, 6, 7, 12};
  both(rows);
  rows.first_rows = {0, 6, 7, 10};
  both(rows);
}

}  // namespace
}  // namespace marlin::metal::simulated_recurrent_test
