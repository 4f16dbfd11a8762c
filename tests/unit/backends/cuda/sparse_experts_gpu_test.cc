// Experts of 2:4 weights on a GPU, kept sparse, against the same experts with dense weights. On
// lattice data both have the same bits: sums are exact, and the values between the GEMMs round
// alike.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "sparse_fixture.h"

namespace marlin::sparse_experts_gpu_test {
namespace {

/// The size and the form of a layer.
struct LayerShape {
  Format format = Format::kFp4E2M1;
  int64_t hidden = 256;
  int64_t inner = 128;
  int64_t group = 128;
  int64_t experts = 8;
  int64_t top_k = 2;
  bool apart = false;   ///< Gate and up are two matrices.
  bool shared = false;  ///< With a shared expert.
  bool mixed = false;   ///< Every third matrix is dense in both layers.
};

/// A layer that keeps 2:4 weights sparse, and one with the expanded weights.
struct LayerPair {
  LayerShape shape;
  std::vector<Expert> sparse;
  std::vector<Expert> dense;
  SharedExpert shared_sparse;
  SharedExpert shared_dense;
};

class SparseExpertsOnGpu : public SparseOnGpu {
 protected:
  /// Whether the build has kernels for a format.
  bool IsBuilt(Format format) const {
    const Result<PreparedWeights> prepared =
        Prepare(LatticeWeights(format, 128, 128, 128, 1), device());
    EXPECT_TRUE(prepared.ok() || prepared.status().code() == Code::kUnsupported)
        << prepared.status().message();
    return prepared.ok();
  }

  LayerPair Both(const LayerShape& shape, uint32_t seed) const {
    LayerPair pair{shape, {}, {}, {}, {}};
    for (int64_t e = 0; e < shape.experts; ++e) {
      pair.sparse.emplace_back();
      pair.dense.emplace_back();
      AddMatrices(shape, seed + 4 * static_cast<uint32_t>(e), &pair.sparse.back(),
                  &pair.dense.back());
    }
    if (shape.shared) {
      AddMatrices(shape, seed + 1000, &pair.shared_sparse.expert, &pair.shared_dense.expert);
    }
    return pair;
  }

  struct Batch {
    ExpertsProblem problem;
    std::vector<float> x;
    std::vector<int32_t> ids;
    std::vector<float> weights;
  };
  /// Rows with two numbers that are not 0: gates and ups need a few bits. One expert has no rows.
  static Batch MakeBatch(const LayerShape& shape, int64_t tokens, DType x_type = DType::kBf16) {
    Batch batch;
    batch.problem.tokens = tokens;
    batch.problem.top_k = shape.top_k;
    batch.problem.x_type = x_type;
    batch.problem.out_type = DType::kF32;
    batch.problem.gate.activation = Activation::kRelu;
    std::mt19937 random(static_cast<uint32_t>(tokens));
    batch.x.resize(static_cast<size_t>(tokens * shape.hidden));
    std::vector<int32_t> order(static_cast<size_t>(shape.experts - 1));
    std::iota(order.begin(), order.end(), 0);
    constexpr float kFactors[] = {1.0F, 2.0F, -1.0F, 0.5F};
    for (int64_t t = 0; t < tokens; ++t) {
      for (int i = 0; i < 2; ++i) {
        const auto k = static_cast<int64_t>(random() % static_cast<uint32_t>(shape.hidden));
        batch.x[static_cast<size_t>(t * shape.hidden + k)] = random() % 2 == 0 ? 1.0F : -1.0F;
      }
      std::shuffle(order.begin(), order.end(), random);
      batch.ids.insert(batch.ids.end(), order.begin(), order.begin() + shape.top_k);
      for (int64_t s = 0; s < shape.top_k; ++s) batch.weights.push_back(kFactors[random() % 4]);
    }
    return batch;
  }

  static void FillGaussian(Batch* batch) {
    std::mt19937 random(6);
    std::normal_distribution<float> normal;
    for (float& value : batch->x) value = normal(random);
  }

  std::vector<float> Run(const std::vector<Expert>& experts, const SharedExpert& shared,
                         const Batch& batch) const {
    const Result<ExpertSet> set = ExpertSet::Make(device(), experts, shared);
    EXPECT_TRUE(set.ok()) << set.status().message();
    if (!set.ok()) return {};
    const Result<ExpertsPlan> plan = PlanExperts(device(), batch.problem, *set);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    if (!plan.ok()) return {};
    return Run(*plan, set->hidden(), batch);
  }
  std::vector<float> Run(const ExpertsPlan& plan, int64_t hidden, const Batch& batch) const {
    const ExpertsProblem& problem = batch.problem;
    const Shape rows{problem.tokens, hidden};
    const Shape selections{problem.tokens, problem.top_k};
    const DeviceBuffer x = UploadAs(batch.x, problem.x_type);
    const DeviceBuffer ids = Upload(batch.ids);
    const DeviceBuffer weights = Upload(batch.weights);
    const DeviceBuffer out = Make(problem.tokens * hidden * 4);
    const Status status =
        plan.Run({x.data(), problem.x_type, rows}, {ids.data(), DType::kI32, selections},
                 {weights.data(), DType::kF32, selections}, {out.data(), DType::kF32, rows});
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(device().Synchronize().ok());
    return Download<float>(out);
  }

  void Compare(const LayerPair& pair, const Batch& batch) const {
    const std::vector<float> got = Run(pair.sparse, pair.shared_sparse, batch);
    const std::vector<float> expected = Run(pair.dense, pair.shared_dense, batch);
    ASSERT_EQ(got.size(), expected.size());
    ASSERT_FALSE(got.empty());
    const auto hidden = static_cast<size_t>(pair.shape.hidden);
    const auto zeros = std::count(expected.begin(), expected.end(), 0.0F);
    EXPECT_LT(2 * zeros, static_cast<int64_t>(expected.size()));
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i], expected[i])
          << "token " << i / hidden << ", output " << i % hidden << " of " << batch.problem.tokens
          << " tokens, " << hidden << " x " << pair.shape.inner << ", groups of "
          << pair.shape.group << ", " << FormatName(pair.shape.format);
    }
  }
  void Compare(const LayerShape& shape, const std::vector<int64_t>& tokens) const {
    const LayerPair pair = Both(shape, static_cast<uint32_t>(shape.hidden + shape.group));
    for (const int64_t count : tokens) {
      Compare(pair, MakeBatch(shape, count));
      if (HasFatalFailure()) return;
    }
  }

 private:
  DeviceBuffer UploadAs(const std::vector<float>& values, DType type) const {
    if (type == DType::kF32) return Upload(values);
    std::vector<uint16_t> halves;
    for (const float value : values) {
      halves.push_back(type == DType::kBf16 ? FloatToBf16(value) : FloatToHalf(value));
    }
    return Upload(halves);
  }

  void AddMatrices(const LayerShape& shape, uint32_t seed, Expert* sparse, Expert* dense) const {
    const auto add = [&](uint32_t number, int64_t k, int64_t n, ExpertMatrix* kept,
                         ExpertMatrix* expanded) {
      const int64_t group = shape.group == 0 ? k : shape.group;
      const QuantizedWeights weights = LatticeWeights(shape.format, k, n, group, seed + number);
      expanded->weights = KeepExpanded(weights);
      const bool is_dense = shape.mixed && (seed / 4 + number) % 3 == 0;
      kept->weights = is_dense ? expanded->weights : Keep(weights);
    };
    add(0, shape.hidden, shape.inner * (shape.apart ? 1 : 2), &sparse->gate, &dense->gate);
    if (shape.apart) add(1, shape.hidden, shape.inner, &sparse->up, &dense->up);
    add(2, shape.inner, shape.hidden, &sparse->down, &dense->down);
  }
};

/// From one token, whose selections every CTA sorts, to tiles of 192 rows.
constexpr int64_t kTokens[] = {1, 3, 8, 20, 40, 64, 100, 200, 500, 1000};

TEST_F(SparseExpertsOnGpu, EqualDenseOnesForAllFormatsAndTokens) {
  if (IsSkipped()) return;
  int built = 0;
  for (const Format format : {Format::kFp4E2M1, Format::kS4}) {
    if (!IsBuilt(format)) continue;
    ++built;
    for (const int64_t group : {16, 128}) {
      for (const bool apart : {false, true}) {
        LayerShape shape;
        shape.format = format;
        shape.group = group;
        shape.apart = apart;
        shape.shared = group == 128;
        Compare(shape, {std::begin(kTokens), std::end(kTokens)});
        if (HasFatalFailure()) return;
      }
    }
  }
  EXPECT_GT(built, 0);
}

TEST_F(SparseExpertsOnGpu, EqualDenseOnesForAllGroupsAndTails) {
  if (IsSkipped()) return;
  for (const int64_t group : {16, 32, 48, 64, 80, 128, 256, 0}) {
    for (const auto& [hidden, inner] :
         {std::pair<int64_t, int64_t>{128, 64}, {100, 36}, {272, 200}, {768, 320}, {40, 17}}) {
      LayerShape shape;
      shape.hidden = hidden;
      shape.inner = inner;
      shape.group = group;
      Compare(shape, {1, 12, 70});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(SparseExpertsOnGpu, EqualDenseOnesInALargeLayer) {
  if (IsSkipped()) return;
  LayerShape shape;
  shape.hidden = 2048;
  shape.inner = 768;
  shape.experts = 24;
  shape.top_k = 8;
  Compare(shape, {1, 8, 64, 512, 2048});
}

TEST_F(SparseExpertsOnGpu, MixWithDenseOnesInALayer) {
  if (IsSkipped()) return;
  for (const bool apart : {false, true}) {
    for (const int64_t group : {16, 64}) {
      LayerShape shape;
      shape.apart = apart;
      shape.group = group;
      shape.mixed = true;
      shape.shared = true;
      Compare(shape, {1, 8, 64, 500});
      if (HasFatalFailure()) return;
    }
  }
}

/// The exact kernel expands weights in registers: the same bits with any rows.
TEST_F(SparseExpertsOnGpu, AreExactWhereAsked) {
  if (IsSkipped()) return;
  for (const Format format : {Format::kFp4E2M1, Format::kS4}) {
    if (!IsBuilt(format)) continue;
    for (const int64_t group : {16, 48, 128, 0}) {
      LayerShape shape;
      shape.format = format;
      shape.hidden = 272;
      shape.inner = 100;
      shape.group = group;
      shape.mixed = group == 48;
      const LayerPair pair = Both(shape, 7);
      for (const int64_t tokens : {1, 9, 64}) {
        for (const DType type : {DType::kF32, DType::kBf16, DType::kF16}) {
          Batch batch = MakeBatch(shape, tokens, type);
          Compare(pair, batch);
          FillGaussian(&batch);
          batch.problem.gate.activation = Activation::kSilu;
          batch.problem.accuracy = Accuracy::kExact;
          Compare(pair, batch);
          batch.problem.accuracy = Accuracy::kDefault;
          batch.problem.allow_bf16_activations = false;
          if (type == DType::kF32) Compare(pair, batch);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_F(SparseExpertsOnGpu, TakeThreeQuartersOfTheMemory) {
  if (IsSkipped()) return;
  const LayerPair pair = Both(LayerShape(), 3);
  const auto bytes = [](const Expert& expert) {
    return expert.gate.weights.bytes() + expert.down.weights.bytes();
  };
  EXPECT_LT(bytes(pair.sparse[0]), bytes(pair.dense[0]) * 4 / 5);
}

TEST_F(SparseExpertsOnGpu, AreBatchInvariantWhereAsked) {
  if (IsSkipped()) return;
  LayerShape shape;
  shape.hidden = 400;
  const LayerPair pair = Both(shape, 5);
  Batch all = MakeBatch(shape, 200);
  FillGaussian(&all);
  all.problem.determinism = Determinism::kBatchInvariant;
  const std::vector<float> expected = Run(pair.sparse, {}, all);
  for (const int64_t tokens : {1, 8, 33, 150}) {
    Batch some = all;
    some.problem.tokens = tokens;
    some.x.resize(static_cast<size_t>(tokens * shape.hidden));
    some.ids.resize(static_cast<size_t>(tokens * shape.top_k));
    some.weights.resize(some.ids.size());
    const std::vector<float> got = Run(pair.sparse, {}, some);
    ASSERT_FALSE(got.empty());
    ASSERT_TRUE(std::equal(got.begin(), got.end(), expected.begin())) << tokens << " tokens";
  }
}

TEST_F(SparseExpertsOnGpu, RepeatTheirBits) {
  if (IsSkipped()) return;
  LayerShape shape;
  shape.hidden = 1040;
  shape.inner = 400;
  const LayerPair pair = Both(shape, 9);
  const ExpertSet set = *ExpertSet::Make(device(), pair.sparse);
  for (const int64_t tokens : {4, 40, 700}) {
    Batch batch = MakeBatch(shape, tokens);
    FillGaussian(&batch);
    const ExpertsPlan plan = *PlanExperts(device(), batch.problem, set);
    const std::vector<float> first = Run(plan, shape.hidden, batch);
    constexpr int kRepeats = 100;
    for (int i = 0; i < kRepeats; ++i) {
      ASSERT_EQ(Run(plan, shape.hidden, batch), first) << "run " << i << " of " << tokens;
    }
  }
}

}  // namespace
}  // namespace marlin::sparse_experts_gpu_test
