// The experts of a layer, against the same MLPs run one by one, and against double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/scalars.h"
#include "device_test.h"
#include "marlin/decoder.h"
#include "marlin/moe.h"
#include "marlin/quantize.h"

namespace marlin::experts_test {
namespace {

constexpr int64_t kHidden = 160;
constexpr int64_t kInner = 96;

/// Values in [-1, 1].
std::vector<float> Floats(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    value = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31F;
  }
  return values;
}

/// A matrix [k, n], its prepared form and what that decodes to.
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

Matrix MakeMatrix(const Device& device, int64_t k, int64_t n, QuantizeOptions options,
                  uint32_t seed, bool biased = false) {
  const std::vector<float> values = Floats(k * n, seed);
  const auto quantized = Quantize({values.data(), DType::kF32, {k, n}}, options);
  EXPECT_TRUE(quantized.ok()) << quantized.status().message();
  Matrix matrix;
  matrix.ready = *Prepare(*quantized, device);
  matrix.dense.resize(static_cast<size_t>(k * n));
  EXPECT_TRUE(Dequantize(*quantized, {matrix.dense.data(), DType::kF32, {k, n}}).ok());
  if (biased) matrix.bias = Floats(n, seed + 1000);
  return matrix;
}

/// An MLP, with gate and up side by side or apart.
struct Mlp {
  Matrix gate;  ///< Or gate | up.
  Matrix up;
  Matrix down;
  bool apart = false;

  Expert operands() const {
    return {gate.operand(), apart ? up.operand() : ExpertMatrix(), down.operand()};
  }
};

struct MlpOptions {
  QuantizeOptions weights = {.format = Format::kFp4E2M1, .group_size = 32};
  bool apart = false;
  bool biased = false;
  int64_t inner = kInner;
};

Mlp MakeMlp(const Device& device, const MlpOptions& options, uint32_t seed) {
  Mlp mlp;
  mlp.apart = options.apart;
  const int64_t columns = options.inner * (options.apart ? 1 : 2);
  mlp.gate = MakeMatrix(device, kHidden, columns, options.weights, seed, options.biased);
  if (options.apart) {
    mlp.up = MakeMatrix(device, kHidden, options.inner, options.weights, seed + 1, options.biased);
  }
  mlp.down = MakeMatrix(device, options.inner, kHidden, options.weights, seed + 2, options.biased);
  return mlp;
}

/// Experts, the selections of some tokens, and their x in one type.
struct Layer {
  std::vector<Mlp> experts;
  Mlp shared;
  PreparedWeights shared_gate;
  std::vector<float> shared_gate_dense;
  bool has_shared = false;

  Result<ExpertSet> Set(const Device& device) const {
    std::vector<Expert> all;
    for (const Mlp& mlp : experts) all.push_back(mlp.operands());
    if (!has_shared) return ExpertSet::Make(device, all);
    return ExpertSet::Make(device, all, {shared.operands(), shared_gate});
  }
};

struct Batch {
  int64_t tokens = 0;
  int64_t top_k = 0;
  std::vector<float> x;
  std::vector<int32_t> ids;
  std::vector<float> weights;

  TensorView ids_view() const { return {ids.data(), DType::kI32, {tokens, top_k}}; }
  TensorView weights_view() const { return {weights.data(), DType::kF32, {tokens, top_k}}; }
};

Batch MakeBatch(int64_t tokens, int64_t top_k, int64_t experts, uint32_t seed) {
  Batch batch{tokens, top_k, Floats(tokens * kHidden, seed), {}, Floats(tokens * top_k, seed + 1)};
  for (float& value : batch.x) value = Bf16ToFloat(FloatToBf16(value));
  std::mt19937 random(seed);
  std::vector<int32_t> order(static_cast<size_t>(experts));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  for (int64_t t = 0; t < tokens; ++t) {
    std::shuffle(order.begin(), order.end(), random);
    batch.ids.insert(batch.ids.end(), order.begin(), order.begin() + top_k);
  }
  return batch;
}

double Activate(const GateOptions& options, double gate, double up) {
  if (options.limit != 0) {
    const double limit = options.limit;
    const double g = std::min(gate, limit);
    return (std::clamp(up, -limit, limit) + 1) * g / (1 + std::exp(-options.alpha * g));
  }
  switch (options.activation) {
    case Activation::kSilu:
      return gate / (1 + std::exp(-gate)) * up;
    case Activation::kGeluTanh:
      return 0.5 * gate *
             (1 + std::tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))) * up;
    case Activation::kRelu:
      return std::max(gate, 0.0) * up;
    case Activation::kNone:
      break;
  }
  return gate * up;
}

std::vector<double> Times(const Matrix& matrix, const std::vector<double>& x) {
  const size_t n = matrix.dense.size() / x.size();
  std::vector<double> y(n, 0.0);
  for (size_t i = 0; i < x.size(); ++i) {
    for (size_t j = 0; j < n; ++j) y[j] += x[i] * matrix.dense[i * n + j];
  }
  for (size_t j = 0; j < matrix.bias.size(); ++j) y[j] += matrix.bias[j];
  return y;
}

std::vector<double> RunMlp(const Mlp& mlp, const GateOptions& gate, const std::vector<double>& x) {
  std::vector<double> gates = Times(mlp.gate, x);
  std::vector<double> ups;
  if (mlp.apart) {
    ups = Times(mlp.up, x);
  } else {
    ups.assign(gates.begin() + static_cast<int64_t>(gates.size() / 2), gates.end());
    gates.resize(gates.size() / 2);
  }
  for (size_t i = 0; i < gates.size(); ++i) gates[i] = Activate(gate, gates[i], ups[i]);
  return Times(mlp.down, gates);
}

/// The layer in double precision.
std::vector<double> Reference(const Layer& layer, const Batch& batch, const GateOptions& gate) {
  std::vector<double> out;
  for (int64_t t = 0; t < batch.tokens; ++t) {
    const std::vector<double> x(batch.x.begin() + t * kHidden, batch.x.begin() + (t + 1) * kHidden);
    std::vector<double> sum(static_cast<size_t>(kHidden), 0.0);
    const auto add = [&](const Mlp& mlp, double weight) {
      const std::vector<double> y = RunMlp(mlp, gate, x);
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += weight * y[i];
    };
    for (int64_t s = 0; s < batch.top_k; ++s) {
      const auto i = static_cast<size_t>(t * batch.top_k + s);
      add(layer.experts[static_cast<size_t>(batch.ids[i])], batch.weights[i]);
    }
    if (layer.has_shared) {
      double weight = 1;
      if (!layer.shared_gate_dense.empty()) {
        double score = 0;
        for (size_t i = 0; i < x.size(); ++i) score += x[i] * layer.shared_gate_dense[i];
        weight = 1 / (1 + std::exp(-score));
      }
      add(layer.shared, weight);
    }
    out.insert(out.end(), sum.begin(), sum.end());
  }
  return out;
}

ExpertsProblem ProblemOf(const Batch& batch) {
  ExpertsProblem problem;
  problem.tokens = batch.tokens;
  problem.top_k = batch.top_k;
  problem.x_type = DType::kF32;
  problem.out_type = DType::kF32;
  return problem;
}

std::vector<float> RunLayer(const Device& device, const ExpertSet& set, const Batch& batch,
                            const ExpertsProblem& problem) {
  std::vector<float> out(static_cast<size_t>(batch.tokens * kHidden), -7.0F);
  const auto plan = PlanExperts(device, problem, set);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  if (!plan.ok()) return out;
  const Shape shape{batch.tokens, kHidden};
  const Status status = plan->Run({batch.x.data(), DType::kF32, shape}, batch.ids_view(),
                                  batch.weights_view(), {out.data(), DType::kF32, shape});
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

void ExpectClose(const std::vector<float>& out, const std::vector<double>& expected,
                 double tolerance) {
  ASSERT_EQ(out.size(), expected.size());
  double largest = 0;
  for (const double value : expected) largest = std::max(largest, std::fabs(value));
  for (size_t i = 0; i < out.size(); ++i) {
    ASSERT_NEAR(out[i], expected[i], tolerance * largest) << i;
  }
}

class Experts : public testing::DeviceTest {
 protected:
  Layer MakeLayer(int64_t count, const MlpOptions& options) const {
    Layer layer;
    for (int64_t e = 0; e < count; ++e) {
      layer.experts.push_back(MakeMlp(device_, options, static_cast<uint32_t>(10 * e + 1)));
    }
    return layer;
  }
};

TEST_P(Experts, AreCloseToDoublePrecision) {
  const GateOptions clamped{Activation::kSilu, 0.5F, 1.7F};
  const GateOptions gelu{Activation::kGeluTanh};
  for (const GateOptions& gate : {GateOptions(), gelu, clamped}) {
    for (const bool apart : {false, true}) {
      for (const int64_t tokens : {int64_t{1}, int64_t{5}, int64_t{40}}) {
        // On the simulator, many rows use the same gate code as few, and take seconds.
        const bool is_other_gate = gate.limit != 0 || gate.activation == Activation::kGeluTanh;
        if (GetParam() == "metal-sim" && tokens > 5 && is_other_gate) continue;
        MlpOptions options;
        options.apart = apart;
        options.biased = apart || gate.limit != 0;
        const Layer layer = MakeLayer(6, options);
        const Batch batch = MakeBatch(tokens, 3, 6, 77);
        ExpertsProblem problem = ProblemOf(batch);
        problem.gate = gate;
        const std::vector<double> expected = Reference(layer, batch, gate);
        const ExpertSet set = *layer.Set(device_);
        ExpectClose(RunLayer(device_, set, batch, problem), expected, 0x1p-6);
        problem.accuracy = Accuracy::kExact;
        problem.allow_bf16_activations = false;
        ExpectClose(RunLayer(device_, set, batch, problem), expected, 0x1p-18);
      }
    }
  }
}

TEST_P(Experts, MayDifferInFormatAndSize) {
  Layer layer;
  uint32_t seed = 1;
  for (const QuantizeOptions& weights :
       {QuantizeOptions{.format = Format::kFp4E2M1, .group_size = 128},
        QuantizeOptions{.format = Format::kU4, .group_size = 32},
        QuantizeOptions{.format = Format::kInt3, .group_size = 64},
        QuantizeOptions{.format = Format::kS8, .group_size = 128},
        QuantizeOptions{.format = Format::kFp8E4M3, .group_size = 32},
        QuantizeOptions{.format = Format::kBf16}}) {
    MlpOptions options;
    options.weights = weights;
    options.apart = seed % 2 == 0;
    options.inner = kInner + 16 * static_cast<int64_t>(seed);
    layer.experts.push_back(MakeMlp(device_, options, 100 * seed++));
  }
  // One expert has matrices of several formats.
  MlpOptions options;
  options.apart = true;
  layer.experts.push_back(MakeMlp(device_, options, 900));
  layer.experts.back().up =
      MakeMatrix(device_, kHidden, kInner, {.format = Format::kNf4, .group_size = 64}, 901);
  for (const int64_t tokens : {int64_t{1}, int64_t{33}}) {
    const Batch batch = MakeBatch(tokens, 4, 7, 5);
    ExpertsProblem problem = ProblemOf(batch);
    const std::vector<double> expected = Reference(layer, batch, problem.gate);
    const ExpertSet set = *layer.Set(device_);
    ExpectClose(RunLayer(device_, set, batch, problem), expected, 0x1p-6);
    problem.accuracy = Accuracy::kExact;
    problem.allow_bf16_activations = false;
    ExpectClose(RunLayer(device_, set, batch, problem), expected, 0x1p-18);
  }
}

TEST_P(Experts, TakeTheirMatricesOfStacks) {
  const auto stack = [&](int64_t k, int64_t n, uint32_t seed, std::vector<float>* dense) {
    const std::vector<float> values = Floats(3 * k * n, seed);
    const auto quantized = Quantize({values.data(), DType::kF32, {3, k, n}}, {});
    dense->resize(values.size());
    EXPECT_TRUE(Dequantize(*quantized, {dense->data(), DType::kF32, {3, k, n}}).ok());
    return *Prepare(*quantized, device_);
  };
  std::vector<float> gates;
  std::vector<float> downs;
  const PreparedWeights gate = stack(kHidden, 2 * kInner, 1, &gates);
  const PreparedWeights down = stack(kInner, kHidden, 2, &downs);
  Layer layer;
  std::vector<Expert> experts;
  for (int64_t e = 0; e < 3; ++e) {
    const int64_t index = 2 - e;
    experts.push_back({{gate, index}, {}, {down, index}});
    Mlp mlp;
    const int64_t size = 2 * kHidden * kInner;
    mlp.gate.dense.assign(gates.begin() + index * size, gates.begin() + (index + 1) * size);
    mlp.down.dense.assign(downs.begin() + index * size / 2, downs.begin() + (index + 1) * size / 2);
    layer.experts.push_back(mlp);
  }
  const Batch batch = MakeBatch(4, 2, 3, 16);
  ExpertsProblem problem = ProblemOf(batch);
  problem.accuracy = Accuracy::kExact;
  ExpectClose(RunLayer(device_, *ExpertSet::Make(device_, experts), batch, problem),
              Reference(layer, batch, problem.gate), 0x1p-18);
}

TEST_P(Experts, AddTheSharedExpertLast) {
  for (const bool gated : {false, true}) {
    Layer layer = MakeLayer(4, {});
    MlpOptions options;
    options.inner = 208;
    layer.shared = MakeMlp(device_, options, 500);
    layer.has_shared = true;
    if (gated) {
      const Matrix gate = MakeMatrix(device_, kHidden, 1, {.format = Format::kFp32}, 600);
      layer.shared_gate = gate.ready;
      layer.shared_gate_dense = gate.dense;
    }
    const Batch batch = MakeBatch(7, 2, 4, 6);
    ExpertsProblem problem = ProblemOf(batch);
    problem.accuracy = Accuracy::kExact;
    ExpectClose(RunLayer(device_, *layer.Set(device_), batch, problem),
                Reference(layer, batch, problem.gate), 0x1p-18);
  }
}

TEST_P(Experts, OnOtherDevicesAddNothing) {
  const Layer layer = MakeLayer(5, {});
  Batch batch = MakeBatch(9, 3, 5, 8);
  std::vector<Expert> all;
  for (const Mlp& mlp : layer.experts) all.push_back(mlp.operands());
  all[1] = Expert();
  all[4] = Expert();
  batch.ids[0] = 1;  // The first token selects only these.
  batch.ids[1] = 4;
  batch.ids[2] = 1;
  const ExpertsProblem problem = ProblemOf(batch);
  const std::vector<float> out = RunLayer(device_, *ExpertSet::Make(device_, all), batch, problem);
  for (int64_t i = 0; i < kHidden; ++i) ASSERT_EQ(out[static_cast<size_t>(i)], 0.0F);
  for (size_t i = 0; i < batch.ids.size(); ++i) {
    if (batch.ids[i] == 1 || batch.ids[i] == 4) batch.weights[i] = 0;
  }
  ExpectClose(out, Reference(layer, batch, problem.gate), 0x1p-6);
  // None at all: the sum is zero.
  const auto none = ExpertSet::Make(device_, std::vector<Expert>(3));
  ASSERT_TRUE(none.ok());
  EXPECT_EQ(none->count(), 3);
  EXPECT_EQ(none->hidden(), 0);
}

TEST_P(Experts, ReadAndWrite16BitRowsWithStrides) {
  const Layer layer = MakeLayer(4, {});
  const Batch batch = MakeBatch(6, 2, 4, 9);
  const ExpertSet set = *layer.Set(device_);
  ExpertsProblem problem = ProblemOf(batch);
  const std::vector<float> expected = RunLayer(device_, set, batch, problem);
  constexpr int64_t kStride = kHidden + 8;
  std::vector<uint16_t> x(static_cast<size_t>(batch.tokens * kStride), 0x7fc0);
  std::vector<uint16_t> out(x.size(), 0x1234);
  for (int64_t t = 0; t < batch.tokens; ++t) {
    for (int64_t i = 0; i < kHidden; ++i) {
      x[static_cast<size_t>(t * kStride + i)] =
          FloatToBf16(batch.x[static_cast<size_t>(t * kHidden + i)]);
    }
  }
  problem.x_type = DType::kBf16;
  problem.out_type = DType::kBf16;
  const Shape shape{batch.tokens, kHidden};
  const auto plan = PlanExperts(device_, problem, set);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  std::vector<std::byte> memory(static_cast<size_t>(plan->workspace_bytes()) + 64);
  ExpertsArguments arguments;
  arguments.workspace =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
  arguments.workspace_bytes = plan->workspace_bytes();
  const Status status =
      plan->Run({x.data(), DType::kBf16, shape, {kStride, 1}}, batch.ids_view(),
                batch.weights_view(), {out.data(), DType::kBf16, shape, {kStride, 1}}, arguments);
  ASSERT_TRUE(status.ok()) << status.message();
  for (int64_t t = 0; t < batch.tokens; ++t) {
    for (int64_t i = 0; i < kHidden; ++i) {
      const float wanted = expected[static_cast<size_t>(t * kHidden + i)];
      ASSERT_NEAR(Bf16ToFloat(out[static_cast<size_t>(t * kStride + i)]), wanted,
                  0x1p-8F * std::fabs(wanted) + 0x1p-5F)
          << t << " " << i;
    }
    ASSERT_EQ(out[static_cast<size_t>(t * kStride + kHidden)], 0x1234);
  }
}

TEST_P(Experts, KeepAPoisonedRowToItself) {
  const Layer layer = MakeLayer(4, {});
  Batch batch = MakeBatch(8, 3, 4, 10);
  const ExpertSet set = *layer.Set(device_);
  const ExpertsProblem problem = ProblemOf(batch);
  const std::vector<float> clean = RunLayer(device_, set, batch, problem);
  batch.x[3 * kHidden + 5] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> poisoned = RunLayer(device_, set, batch, problem);
  for (size_t i = 0; i < clean.size(); ++i) {
    const bool own = static_cast<int64_t>(i) / kHidden == 3;
    ASSERT_EQ(std::isnan(poisoned[i]), own) << i;
    if (!own) {
      ASSERT_EQ(poisoned[i], clean[i]) << i;
    }
  }
}

TEST_P(Experts, AreBatchInvariantWhenAsked) {
  const Layer layer = MakeLayer(3, {});
  const Batch batch = MakeBatch(30, 2, 3, 11);
  const ExpertSet set = *layer.Set(device_);
  ExpertsProblem problem = ProblemOf(batch);
  problem.determinism = Determinism::kBatchInvariant;
  const std::vector<float> all = RunLayer(device_, set, batch, problem);
  for (int64_t t = 0; t < batch.tokens; t += 7) {
    Batch one{1, 2, {}, {}, {}};
    one.x.assign(batch.x.begin() + t * kHidden, batch.x.begin() + (t + 1) * kHidden);
    one.ids.assign(batch.ids.begin() + 2 * t, batch.ids.begin() + 2 * t + 2);
    one.weights.assign(batch.weights.begin() + 2 * t, batch.weights.begin() + 2 * t + 2);
    problem.tokens = 1;
    const std::vector<float> alone = RunLayer(device_, set, one, problem);
    for (int64_t i = 0; i < kHidden; ++i) {
      ASSERT_EQ(alone[static_cast<size_t>(i)], all[static_cast<size_t>(t * kHidden + i)]) << t;
    }
  }
}

TEST_P(Experts, RunMoreTokensThanAPass) {
  // Two experts, so that each has several MC blocks of rows; one has no tokens in the second pass.
  const Layer layer = MakeLayer(2, {});
  Batch batch = MakeBatch(GetParam() == "cpu" ? 1500 : 40, 1, 2, 12);
  for (size_t i = batch.ids.size() * 2 / 3; i < batch.ids.size(); ++i) batch.ids[i] = 1;
  const ExpertSet set = *layer.Set(device_);
  const ExpertsProblem problem = ProblemOf(batch);
  const std::vector<float> out = RunLayer(device_, set, batch, problem);
  ExpectClose(out, Reference(layer, batch, problem.gate), 0x1p-6);
  for (int repetition = 0; repetition < 3; ++repetition) {
    ASSERT_EQ(out, RunLayer(device_, set, batch, problem));
  }
}

TEST_P(Experts, AreExactOnIntegers) {
  // Small integers as weights (no scale rounds), activations and sums: every order and precision of
  // the sums gives the same number.
  std::mt19937 random(3);
  const auto integers = [&](int64_t count, int least, int most) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) {
      value = static_cast<float>(
          least + static_cast<int>(random() % static_cast<uint32_t>(most - least + 1)));
    }
    return values;
  };
  const auto matrix = [&](int64_t k, int64_t n) {
    Matrix made;
    made.dense = integers(k * n, -1, 1);
    const auto quantized =
        Quantize({made.dense.data(), DType::kF32, {k, n}}, {.format = Format::kBf16});
    made.ready = *Prepare(*quantized, device_);
    return made;
  };
  Layer layer;
  for (int e = 0; e < 4; ++e) {
    Mlp mlp;
    mlp.gate = matrix(kHidden, 2 * 16);
    mlp.down = matrix(16, kHidden);
    layer.experts.push_back(mlp);
  }
  layer.shared = layer.experts[2];
  layer.has_shared = true;
  for (const int64_t tokens : {int64_t{1}, int64_t{3}, int64_t{50}}) {
    Batch batch = MakeBatch(tokens, 2, 4, 13);
    // Sparse rows keep the products of gate and up small enough for bf16.
    batch.x.assign(batch.x.size(), 0.0F);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int j = 0; j < 3; ++j) {
        batch.x[static_cast<size_t>(t * kHidden + random() % kHidden)] = 1.0F;
      }
    }
    batch.weights = integers(tokens * 2, 1, 4);
    ExpertsProblem problem = ProblemOf(batch);
    problem.gate.activation = Activation::kRelu;
    const std::vector<double> expected = Reference(layer, batch, problem.gate);
    const std::vector<float> out = RunLayer(device_, *layer.Set(device_), batch, problem);
    for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], expected[i]) << tokens << " " << i;
  }
}

TEST_P(Experts, RouteAndRunInOneCall) {
  const Layer layer = MakeLayer(6, {});
  const Matrix gate = MakeMatrix(device_, kHidden, 6, {.format = Format::kFp32}, 700);
  const ExpertSet set = *layer.Set(device_);
  Router router{gate.ready, {}, {}};
  router.options.top_k = 3;
  Batch batch = MakeBatch(11, 3, 6, 14);
  const Shape rows{batch.tokens, kHidden};
  const Shape selections{batch.tokens, 3};
  const TensorView x(batch.x.data(), DType::kF32, rows);
  ASSERT_TRUE(RouteHiddenStates(device_, x, router, {batch.ids.data(), DType::kI32, selections},
                                {batch.weights.data(), DType::kF32, selections})
                  .ok());
  // No device of this test has an operation of its own for it.
  Batch other = batch;
  router.accuracy = Accuracy::kDefault;
  ASSERT_TRUE(RouteHiddenStates(device_, x, router, {other.ids.data(), DType::kI32, selections},
                                {other.weights.data(), DType::kF32, selections})
                  .ok());
  EXPECT_EQ(other.ids, batch.ids);
  EXPECT_EQ(other.weights, batch.weights);
  std::vector<float> out(batch.x.size());
  const Status status = MoeForward(device_, x, router, set, {out.data(), DType::kF32, rows});
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(out, RunLayer(device_, set, batch, ProblemOf(batch)));
  // The selections are those of the logits in double precision.
  for (int64_t t = 0; t < batch.tokens; ++t) {
    std::vector<double> logits(6, 0.0);
    for (size_t i = 0; i < static_cast<size_t>(kHidden); ++i) {
      for (size_t e = 0; e < 6; ++e) {
        logits[e] += batch.x[static_cast<size_t>(t * kHidden) + i] * gate.dense[i * 6 + e];
      }
    }
    const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
    EXPECT_EQ(batch.ids[static_cast<size_t>(3 * t)], best);
  }
}

TEST_P(Experts, RouteAndRunInTheWorkspaceOfTheCaller) {
  const Layer layer = MakeLayer(6, {});
  const Matrix gate = MakeMatrix(device_, kHidden, 6, {.format = Format::kFp32}, 700);
  const ExpertSet set = *layer.Set(device_);
  Router router{gate.ready, {}, {}};
  router.options.top_k = 3;
  constexpr int64_t kGuard = 64;
  for (const int64_t tokens : {1, 11, 40}) {
    const Batch batch = MakeBatch(tokens, 3, 6, 14);
    const Shape rows{tokens, kHidden};
    const TensorView x(batch.x.data(), DType::kF32, rows);
    std::vector<float> expected(batch.x.size());
    ASSERT_TRUE(MoeForward(device_, x, router, set, {expected.data(), DType::kF32, rows}).ok());
    ASSERT_TRUE(device_.Synchronize().ok());
    const auto bytes = MoeWorkspaceBytes(device_, tokens, DType::kF32, DType::kF32, router, set);
    ASSERT_TRUE(bytes.ok()) << bytes.status().message();
    const DeviceBuffer memory = *DeviceBuffer::Allocate(device_, *bytes + kGuard);
    const std::vector<uint8_t> fill(static_cast<size_t>(*bytes + kGuard), 0xa5);
    ASSERT_TRUE(memory.CopyFrom(fill.data(), *bytes + kGuard).ok());
    MoeOptions options;
    options.workspace = memory.data();
    options.workspace_bytes = *bytes;
    std::vector<float> out(batch.x.size());
    const MutableTensorView to(out.data(), DType::kF32, rows);
    const Status status = MoeForward(device_, x, router, set, to, options);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_TRUE(device_.Synchronize().ok());
    EXPECT_EQ(out, expected);
    std::vector<uint8_t> after(fill.size());
    ASSERT_TRUE(memory.CopyTo(after.data(), *bytes + kGuard).ok());
    EXPECT_TRUE(std::equal(after.end() - kGuard, after.end(), fill.end() - kGuard));
    // Not only the logits and the selections are there, but also the values of the experts.
    const auto changed =
        std::count_if(after.begin(), after.end(), [](uint8_t value) { return value != 0xa5; });
    EXPECT_GT(changed, tokens * 3 * kHidden);
    options.workspace_bytes = *bytes - 1;
    const Status small = MoeForward(device_, x, router, set, to, options);
    EXPECT_EQ(small.code(), Code::kInvalidArgument);
    EXPECT_EQ(small.message(), "workspace: expected at least " + std::to_string(*bytes) +
                                   " bytes, got " + std::to_string(*bytes - 1));
    options.workspace = static_cast<std::byte*>(memory.data()) + 4;
    options.workspace_bytes = *bytes;
    const Status shifted = MoeForward(device_, x, router, set, to, options);
    EXPECT_EQ(shifted.code(), Code::kInvalidArgument);
    EXPECT_EQ(shifted.message(),
              "workspace: must be aligned to 64 bytes, got an address 4 bytes past");
  }
  const auto none = MoeWorkspaceBytes(device_, 0, DType::kF32, DType::kF32, router, set);
  ASSERT_TRUE(none.ok()) << none.status().message();
  EXPECT_EQ(*none, 0);
}

TEST_P(Experts, WithoutTokensDoNothing) {
  const Layer layer = MakeLayer(2, {});
  const Batch batch = MakeBatch(0, 2, 2, 15);
  EXPECT_TRUE(RunLayer(device_, *layer.Set(device_), batch, ProblemOf(batch)).empty());
}

INSTANTIATE_TEST_SUITE_P(Devices, Experts, ::testing::Values("cpu", "metal-sim"),
                         [](const auto& test) {
                           return test.param == "cpu" ? std::string("Cpu")
                                                      : std::string("MetalSimulator");
                         });

class WrongExperts : public ::testing::Test {
 protected:
  std::string Message(const Status& status) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return std::string(status.message());
  }

  Device device_ = *Device::Open("cpu", {.threads = 1});
};

TEST_F(WrongExperts, AreRefusedByName) {
  const Mlp good = MakeMlp(device_, {}, 1);
  MlpOptions wide;
  wide.inner = 112;
  const Mlp other = MakeMlp(device_, wide, 2);
  EXPECT_EQ(Message(ExpertSet::Make(device_, {}).status()), "experts: expected one or more");
  Expert mixed = good.operands();
  mixed.down = other.down.operand();
  const std::vector<Expert> experts = {good.operands(), mixed};
  EXPECT_EQ(Message(ExpertSet::Make(device_, experts).status()),
            "expert 1 gate: expected [160, 224], got [160, 192]");
  Expert half = good.operands();
  half.down = ExpertMatrix();
  EXPECT_NE(Message(ExpertSet::Make(device_, {&half, 1}).status()).find("expert 0"),
            std::string::npos);
  Expert index = good.operands();
  index.gate.index = 1;
  EXPECT_NE(Message(ExpertSet::Make(device_, {&index, 1}).status()).find("expert 0 gate: expert"),
            std::string::npos);
  const Device another = *Device::Open("cpu", {.threads = 1});
  const Expert fine = good.operands();
  EXPECT_NE(Message(ExpertSet::Make(another, {&fine, 1}).status()).find("expert 0 gate"),
            std::string::npos);
  const ExpertSet set = *ExpertSet::Make(device_, {&fine, 1});
  EXPECT_EQ(Message(PlanExperts(another, {1, 1}, set).status()),
            "experts: prepared for another device");
  EXPECT_EQ(Message(PlanExperts(device_, {-1, 1}, set).status()),
            "tokens: expected 0 or more, got -1");
  EXPECT_EQ(Message(PlanExperts(device_, {1, 0}, set).status()),
            "top_k: expected 1 or more, got 0");
  EXPECT_NE(Message(PlanExperts(device_, {int64_t{1} << 40, 8}, set).status()).find("tokens: "),
            std::string::npos);
  EXPECT_EQ(Message(PlanExperts(device_, {1, 1}, ExpertSet()).status()), "experts: an empty set");
  EXPECT_EQ(Message(ExpertsPlan().Run({}, {}, {}, {})), "plan: an empty plan cannot run");
}

TEST_F(WrongExperts, BlocksAreRefusedByName) {
  Layer layer;
  layer.experts = {MakeMlp(device_, {}, 1), MakeMlp(device_, {}, 2)};
  const ExpertSet set = *layer.Set(device_);
  const Matrix gate = MakeMatrix(device_, kHidden, 3, {.format = Format::kFp32}, 3);
  const auto bytes = [&](int64_t tokens, DType type, const Router& router) {
    return Message(MoeWorkspaceBytes(device_, tokens, type, DType::kF32, router, set).status());
  };
  EXPECT_EQ(bytes(1, DType::kF32, {gate.ready, {}, {}}), "router: 3 experts, but the set has 2");
  EXPECT_EQ(bytes(1, DType::kF32, {}), "router: weights: not prepared");
  const Matrix two = MakeMatrix(device_, kHidden, 2, {.format = Format::kFp32}, 3);
  EXPECT_EQ(bytes(-1, DType::kF32, {two.ready, {}, {}}), "tokens: expected 0 or more, got -1");
  EXPECT_NE(bytes(1, DType::kI32, {two.ready, {}, {}}).find("x_type: "), std::string::npos);
  // A workspace that overlaps out.
  std::vector<float> out(1 << 20);
  const std::vector<float> x(kHidden, 1.0F);
  const Shape rows{1, kHidden};
  MoeOptions options;
  options.workspace =
      reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(out.data()) + 63) / 64 * 64);
  options.workspace_bytes = int64_t{4} * ((1 << 20) - 16);
  const Status over = MoeForward(device_, {x.data(), DType::kF32, rows}, {two.ready, {}, {}}, set,
                                 {out.data(), DType::kF32, rows}, options);
  EXPECT_NE(Message(over).find("overlap"), std::string::npos);
}

TEST_F(WrongExperts, OperandsAreRefusedByName) {
  Layer layer;
  layer.experts = {MakeMlp(device_, {}, 1), MakeMlp(device_, {}, 2)};
  const ExpertSet set = *layer.Set(device_);
  Batch batch = MakeBatch(3, 2, 2, 1);
  const ExpertsPlan plan = *PlanExperts(device_, ProblemOf(batch), set);
  const Shape rows{3, kHidden};
  std::vector<float> out(batch.x.size());
  const TensorView x(batch.x.data(), DType::kF32, rows);
  const MutableTensorView y(out.data(), DType::kF32, rows);
  const auto run = [&](const TensorView& from, const TensorView& ids, const TensorView& weights,
                       const MutableTensorView& to) {
    return Message(plan.Run(from, ids, weights, to));
  };
  const TensorView ids = batch.ids_view();
  const TensorView weights = batch.weights_view();
  const TensorView few(batch.x.data(), DType::kF32, {2, kHidden});
  EXPECT_NE(run(few, ids, weights, y).find("x: expected [3, 160]"), std::string::npos);
  const TensorView half(batch.x.data(), DType::kBf16, rows);
  EXPECT_EQ(run(half, ids, weights, y), "x: expected f32, which the plan is for, got bf16");
  EXPECT_NE(run(x, weights, weights, y).find("ids: expected i32"), std::string::npos);
  EXPECT_NE(run(x, ids, ids, y).find("weights: expected contiguous f32"), std::string::npos);
  const MutableTensorView over(batch.x.data(), DType::kF32, rows);
  EXPECT_NE(run(x, ids, weights, over).find("overlap"), std::string::npos);
  batch.ids[3] = 2;
  EXPECT_EQ(run(x, ids, weights, y), "ids: token 1, selection 1: 2 is not in 0..1");
  batch.ids[3] = -1;
  EXPECT_EQ(run(x, ids, weights, y), "ids: token 1, selection 1: -1 is not in 0..1");
}

}  // namespace
}  // namespace marlin::experts_test
