// Layers of experts for the simulator, and their results in double precision.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "backends/metal/metal_backend.h"
#include "backends/metal/runtime/simulated_driver.h"
#include "marlin/moe.h"
#include "marlin/quantize.h"
#include "ops/device/device.h"

namespace marlin::metal {

/// A matrix, and what it decodes to.
struct Matrix {
  PreparedWeights ready;
  std::vector<float> dense;
  std::vector<float> bias;

  ExpertMatrix operand() const {
    ExpertMatrix made;
    made.weights = ready;
    if (!bias.empty()) {
      made.bias = TensorView(bias.data(), DType::kF32, {static_cast<int64_t>(bias.size())});
    }
    return made;
  }
};

/// An expert, with gate and up side by side in `gate` if `up` is empty.
struct Mlp {
  Matrix gate;
  Matrix up;
  Matrix down;
  bool present = true;

  Expert operands() const {
    Expert expert;
    if (!present) return expert;
    expert.gate = gate.operand();
    if (up.ready.valid()) expert.up = up.operand();
    expert.down = down.operand();
    return expert;
  }
};

/// Sizes of a layer, and how its weights are made.
struct LayerOptions {
  int64_t hidden = 24;
  int64_t inner = 16;
  int64_t experts = 3;
  bool apart = false;
  bool biased = false;
  bool shared = false;
  bool shared_gate = false;
  /// Without quantization options: weights -1, 0 and 1, so that every order of sums gives the same.
  std::optional<QuantizeOptions> quantized = {};
};

struct Layer {
  LayerOptions options;
  std::vector<Mlp> experts;
  Mlp shared;
  Matrix shared_gate;
  ExpertSet set;
};

/// Operands of a run; x is exact in every activation type.
struct Batch {
  int64_t tokens = 0;
  int64_t top_k = 0;
  std::vector<float> x;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

class SimulatedExperts : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto driver = OpenSimulatedDriver(&launches_);
    opened_ = driver.status();
    if (!opened_.ok()) return;
    device_ = Internals::Make<Device>(
        std::make_shared<Device::Impl>(MakeMetalBackend(std::move(*driver))));
  }
  static void TearDownTestSuite() { device_.reset(); }
  void SetUp() override {
    if (!opened_.ok()) GTEST_SKIP() << opened_.message();
  }

  Matrix MakeMatrix(int64_t k, int64_t n, const std::optional<QuantizeOptions>& quantized,
                    bool biased) {
    std::vector<float> values(static_cast<size_t>(k * n));
    for (float& value : values) {
      value = quantized ? static_cast<float>(random_() % 2048) / 1024.0F - 1.0F
                        : static_cast<float>(static_cast<int>(random_() % 3) - 1);
    }
    const QuantizeOptions options = quantized.value_or(QuantizeOptions{.format = Format::kBf16});
    const auto weights = Quantize({values.data(), DType::kF32, {k, n}}, options);
    EXPECT_TRUE(weights.ok()) << weights.status().message();
    Matrix matrix;
    matrix.ready = *Prepare(*weights, *device_);
    matrix.dense.resize(values.size());
    EXPECT_TRUE(Dequantize(*weights, {matrix.dense.data(), DType::kF32, {k, n}}).ok());
    for (int64_t i = 0; biased && i < n; ++i) {
      matrix.bias.push_back(static_cast<float>(static_cast<int>(random_() % 5) - 2));
    }
    return matrix;
  }

  Mlp MakeMlp(const LayerOptions& options) {
    const auto matrix = [&](int64_t k, int64_t n) {
      return MakeMatrix(k, n, options.quantized, options.biased);
    };
    Mlp mlp;
    mlp.gate = matrix(options.hidden, options.inner * (options.apart ? 1 : 2));
    if (options.apart) mlp.up = matrix(options.hidden, options.inner);
    mlp.down = matrix(options.inner, options.hidden);
    return mlp;
  }

  Layer MakeLayer(const LayerOptions& options) {
    Layer layer;
    layer.options = options;
    for (int64_t e = 0; e < options.experts; ++e) layer.experts.push_back(MakeMlp(options));
    if (options.shared) layer.shared = MakeMlp(options);
    if (options.shared_gate) {
      layer.shared_gate =
          MakeMatrix(options.hidden, 1, QuantizeOptions{.format = Format::kFp32}, false);
    }
    return layer;
  }

  static void MakeSet(Layer* layer) {
    std::vector<Expert> all;
    for (const Mlp& mlp : layer->experts) all.push_back(mlp.operands());
    SharedExpert shared;
    if (layer->options.shared) shared.expert = layer->shared.operands();
    if (layer->options.shared_gate) shared.gate = layer->shared_gate.ready;
    const auto set = ExpertSet::Make(*device_, all, shared);
    ASSERT_TRUE(set.ok()) << set.status().message();
    layer->set = *set;
  }

  /// Selections of all experts at random, the same one possibly several times.
  Batch MakeBatch(const Layer& layer, int64_t tokens, int64_t top_k) {
    Batch batch{tokens, top_k, {}, {}, {}};
    for (int64_t i = 0; i < tokens * layer.options.hidden; ++i) {
      batch.x.push_back(static_cast<float>(static_cast<int>(random_() % 3) - 1));
    }
    for (int64_t i = 0; i < tokens * top_k; ++i) {
      batch.ids.push_back(static_cast<int32_t>(random_() % layer.experts.size()));
      batch.weights.push_back(static_cast<float>(1 + random_() % 4));
    }
    return batch;
  }

  static ExpertsProblem ProblemOf(const Batch& batch) {
    ExpertsProblem problem{batch.tokens, batch.top_k, DType::kF32, DType::kF32};
    problem.gate.activation = Activation::kRelu;
    problem.accuracy = Accuracy::kExact;
    problem.allow_bf16_activations = false;
    return problem;
  }

  static Status TryRun(const Layer& layer, const Batch& batch, const ExpertsProblem& problem,
                       std::vector<float>* out) {
    const Shape rows{batch.tokens, layer.options.hidden};
    const Shape selections{batch.tokens, batch.top_k};
    out->assign(batch.x.size(), -7.0F);
    const auto plan = PlanExperts(*device_, problem, layer.set);
    if (!plan.ok()) return plan.status();
    launches_.clear();
    return plan->Run(
        {batch.x.data(), DType::kF32, rows}, {batch.ids.data(), DType::kI32, selections},
        {batch.weights.data(), DType::kF32, selections}, {out->data(), DType::kF32, rows});
  }

  static std::vector<float> Run(const Layer& layer, const Batch& batch,
                                const ExpertsProblem& problem) {
    std::vector<float> out;
    const Status status = TryRun(layer, batch, problem, &out);
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  }

  static std::vector<std::string> Functions() {
    std::vector<std::string> names;
    names.reserve(launches_.size());
    for (const SimulatedLaunch& launch : launches_) names.push_back(launch.function);
    return names;
  }
  static bool Launched(const std::string& name) {
    const std::vector<std::string> names = Functions();
    return std::any_of(names.begin(), names.end(),
                       [&](const std::string& each) { return each.starts_with(name); });
  }

  std::mt19937 random_{7};
  inline static Status opened_;
  inline static std::vector<SimulatedLaunch> launches_;
  inline static std::optional<Device> device_;
};

inline std::vector<double> Times(const Matrix& matrix, const std::vector<double>& x) {
  const size_t n = matrix.dense.size() / x.size();
  std::vector<double> y(n, 0.0);
  for (size_t i = 0; i < x.size(); ++i) {
    for (size_t j = 0; j < n; ++j) y[j] += x[i] * matrix.dense[i * n + j];
  }
  for (size_t j = 0; j < matrix.bias.size(); ++j) y[j] += matrix.bias[j];
  return y;
}

inline double Gated(const GateOptions& gate, double g, double u) {
  if (gate.limit == 0) return std::max(g, 0.0) * u;
  const double limit = gate.limit;
  g = std::min(g, limit);
  return (std::clamp(u, -limit, limit) + 1) * g / (1 + std::exp(-gate.alpha * g));
}

inline std::vector<double> RunMlp(const Mlp& mlp, const GateOptions& gate,
                                  const std::vector<double>& x) {
  std::vector<double> values = Times(mlp.gate, x);
  std::vector<double> ups;
  if (mlp.up.dense.empty()) {
    ups.assign(values.begin() + static_cast<int64_t>(values.size() / 2), values.end());
    values.resize(ups.size());
  } else {
    ups = Times(mlp.up, x);
  }
  for (size_t i = 0; i < values.size(); ++i) values[i] = Gated(gate, values[i], ups[i]);
  return Times(mlp.down, values);
}

/// The layer in double precision, with ReLU or the clamped activation.
inline std::vector<double> Reference(const Layer& layer, const Batch& batch,
                                     const GateOptions& gate = {}) {
  const int64_t hidden = layer.options.hidden;
  std::vector<double> out;
  for (int64_t t = 0; t < batch.tokens; ++t) {
    const std::vector<double> x(batch.x.begin() + t * hidden, batch.x.begin() + (t + 1) * hidden);
    std::vector<double> sum(static_cast<size_t>(hidden), 0.0);
    const auto add = [&](const Mlp& mlp, double weight) {
      const std::vector<double> y = RunMlp(mlp, gate, x);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += weight * y[i];
    };
    for (int64_t i = t * batch.top_k; i < (t + 1) * batch.top_k; ++i) {
      const Mlp& mlp = layer.experts[static_cast<size_t>(batch.ids[static_cast<size_t>(i)])];
      if (mlp.present) add(mlp, batch.weights[static_cast<size_t>(i)]);
    }
    double weight = 1;
    if (layer.options.shared_gate) weight = 1 / (1 + std::exp(-Times(layer.shared_gate, x)[0]));
    if (layer.options.shared) add(layer.shared, weight);
    out.insert(out.end(), sum.begin(), sum.end());
  }
  return out;
}

inline void ExpectEqual(const std::vector<float>& out, const std::vector<double>& expected) {
  ASSERT_EQ(out.size(), expected.size());
  for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], expected[i]) << i;
}

inline void ExpectClose(const std::vector<float>& out, const std::vector<double>& expected) {
  ASSERT_EQ(out.size(), expected.size());
  double largest = 0;
  for (const double value : expected) largest = std::max(largest, std::fabs(value));
  for (size_t i = 0; i < out.size(); ++i) {
    ASSERT_NEAR(out[i], expected[i], 0x1p-18 * largest) << i;
  }
}

}  // namespace marlin::metal
