// The persistent decode kernel on the host, except for gated delta nets: a dense layer and two of
// experts, of one token, with and without a shared expert, and of several rows, against the same in
// double.
#include <gtest/gtest.h>

#if __CUDA_ARCH__ >= 900
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "backends/cuda/persistent/persistent_kernel.cuh"
#include "backends/cuda/persistent/persistent_plan.h"
#include "base/scalars.h"
#include "cuda_emulation/emulate.h"
#include "persistent_parts.h"

namespace marlin::cuda {
namespace {

constexpr int kFeatures = 320;  ///< Not whole tiles.
constexpr int kHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kHeadDim = 128;
constexpr int kPairs = 32;  ///< Half of a head's features rotate.
constexpr int kMixed = kHeads * kHeadDim;
constexpr int kProjected = (kHeads + 2 * kKvHeads) * kHeadDim;
constexpr int kInner = 128;
constexpr int kDenseInner = 384;
constexpr int kCachePages = 4;
constexpr int kPageElements = kKvHeads * kCachePageTokens * 2 * kHeadDim;
constexpr int kLayers = 3;
constexpr uint32_t kSeed =
    100;  ///< Hidden states whose routers have no scores that are nearly the same.

struct ModelCase {
  std::string name;
  PersistentForm form = PersistentForm::kGeneral;
  int parts = 0;  ///< The shared expert's; 0: there is none.
  bool gated = false;
  bool sigmoid = false;  ///< The router's scores, with a bias.
  int groups = 3;        ///< With sigmoid scores.
  int team_warps_log2 = 1;
  bool codes = false;  ///< The cache has e4m3.
  bool norms_after_rotary = false;
  int rows = 1;                      ///< The next tokens of as many texts.
  bool errs = false;                 ///< Its steps with errors are tested, too.
  ZeroKind zeros = ZeroKind::kNone;  ///< Kind of zeros of queries, keys and values,
  int group_size = 64;               ///< and their group size.
  CodeKind kind = CodeKind::kFp4;
  int least_blocks = 4;

  int blocks() const { return std::max(least_blocks, 2 * rows); }
};

struct Layer {
  Layer(const ModelCase& model, int index)
      : seed(static_cast<uint32_t>(1000 * (index + 1))),
        attention_norm(kFeatures, seed, 1.0f),
        mlp_norm(kFeatures, seed + 1, 1.0f),
        query_norm(kHeadDim, seed + 2, 1.0f),
        key_norm(kHeadDim, seed + 3, 1.0f),
        qkv(kFeatures, kProjected, model.group_size, seed + 4, model.zeros, model.kind),
        out(kMixed, kFeatures, 64, seed + 5, ZeroKind::kNone, model.kind),
        router((kExperts + 1) * kFeatures, seed + 6),
        choice_bias(kExperts, seed + 7) {
    if (index == 0) {
      mlps.emplace_back(kFeatures, kDenseInner, 64, seed + 8, model.kind);
      return;
    }
    for (uint32_t e = 0; e < kExperts; ++e)
      mlps.emplace_back(kFeatures, kInner, 128, seed + 10 + 3 * e, model.kind);
    if (model.parts > 0) {
      shared.emplace_back(kFeatures, model.parts * kInner, 64, seed + 50, model.kind);
    }
  }

  uint32_t seed;
  Floats attention_norm;
  Floats mlp_norm;
  Floats query_norm;
  Floats key_norm;
  Matrix qkv;
  Matrix out;
  Floats router;
  Floats choice_bias;
  std::vector<Mlp> mlps;  ///< One: a dense layer.
  std::vector<Mlp> shared;
};

/// A model, its cache, and what the kernel reads.
class Model {
 public:
  explicit Model(const ModelCase& model)
      : case_(model), frequencies_(kPairs, 1), router_(static_cast<size_t>(kLayers)) {
    for (int i = 0; i < kLayers; ++i) layers_.emplace_back(model, i);
    for (int i = 0; i < kPairs; ++i) {
      frequencies_.data()[i] = std::pow(10000.0f, -static_cast<float>(i) / kPairs);
    }
    std::mt19937 random(9);
    std::normal_distribution<float> normal;
    const int pages = case_.rows * kCachePages;
    for (int page = pages - 1; page >= 0; --page) table_.push_back(page);
    cache_.resize(static_cast<size_t>(pages) * kLayers * kPageElements);
    for (float& x : cache_) x = Rounded(normal(random));
    StoreCache();
    Describe();
    for (int row = 0; row <= case_.rows; ++row) first_rows_.push_back(row);
    args_.first_rows = first_rows_.data();
    args_.sequences = case_.rows;
  }

  /// Runs both, and compares the hidden states. `position`: of the first row; others are before.
  void Step(int position, uint32_t seed) {
    Floats hidden(case_.rows * kFeatures, static_cast<uint32_t>(position) + kSeed);
    std::vector<int32_t> positions;
    std::vector<Vector> wanted;
    for (int row = 0; row < case_.rows; ++row) {
      positions.push_back(position - 40 * row);
      wanted.emplace_back(hidden.data() + row * kFeatures, hidden.data() + (row + 1) * kFeatures);
      for (int i = 0; i < kLayers; ++i) RunLayer(i, {row, positions.back()}, &wanted.back());
    }
    args_.hidden = hidden.data();
    args_.position = args_.moves = positions.data();
    ASSERT_EQ(cuda_emulation::Emulate(Kernel(), ShapeOf(seed), args_), "");
    EXPECT_EQ(any_error_, 0);
    EXPECT_GT(margin_, 0.004) << "experts that rounding may exchange";
    for (int row = 0; row < case_.rows; ++row) {
      EXPECT_LT(Distance(hidden.data() + row * kFeatures, wanted[static_cast<size_t>(row)]), 0.01);
    }
    last_.assign(hidden.data(), hidden.data() + case_.rows * kFeatures);
  }
  /// Runs a step that records an error, and leaves nothing behind that later ones read.
  void StepWithError(int position, float value) {
    std::vector<float4> hidden(static_cast<size_t>(case_.rows * kFeatures / 4),
                               {value, value, value, value});
    const std::vector<int32_t> positions(static_cast<size_t>(case_.rows), position);
    args_.hidden = &hidden[0].x;
    args_.position = args_.moves = positions.data();
    ASSERT_EQ(cuda_emulation::Emulate(Kernel(), ShapeOf(0), args_), "");
    EXPECT_EQ(any_error_, 1);
    any_error_ = 0;
    record_ = {};
  }
  const std::vector<float>& last() const { return last_; }

 private:
  /// A row's text and the position of its token.
  struct Place {
    int row;
    int position;
  };

  cuda_emulation::Shape ShapeOf(uint32_t seed) const {
    return {dim3(static_cast<unsigned>(case_.blocks())), kPersistentBlock, args_.shared.bytes,
            seed};
  }
  void (*Kernel() const)(PersistentArguments) {
    return case_.kind == CodeKind::kInt4 ? KernelOf<CodeKind::kInt4>() : KernelOf<CodeKind::kFp4>();
  }
  template <CodeKind kKind>
  void (*KernelOf() const)(PersistentArguments) {
    switch (case_.form) {
      case PersistentForm::kToken:
        return &PersistentKernel<kKind, PersistentForm::kToken>;
      case PersistentForm::kHybrid:
        return &PersistentKernel<kKind, PersistentForm::kHybrid>;
      case PersistentForm::kRows:
        return case_.rows > kMostLimbRows ? &PersistentKernel<kKind, PersistentForm::kRows, false>
                                          : &PersistentKernel<kKind, PersistentForm::kRows>;
      case PersistentForm::kGeneralRows:
        return case_.rows > kMostLimbRows
                   ? &PersistentKernel<kKind, PersistentForm::kGeneralRows, false>
                   : &PersistentKernel<kKind, PersistentForm::kGeneralRows>;
      default:
        return &PersistentKernel<kKind, PersistentForm::kGeneral>;
    }
  }
  float Rounded(float x) const {
    return case_.codes ? Fp8E4M3ToFloat(FloatToFp8E4M3(x)) : Bf16ToFloat(FloatToBf16(x));
  }
  /// Where a position's key or value begins, in a page of a layer.
  size_t PlaceOf(int layer, const Place& at, int kv_head, bool is_value) const {
    const int64_t block = int64_t{at.row} * kCachePages + at.position / kCachePageTokens;
    const int64_t page = table_[static_cast<size_t>(block)];
    const int64_t token = at.position % kCachePageTokens;
    const int side = is_value ? kKvHeads * kCachePageTokens * kHeadDim : 0;
    return static_cast<size_t>((page * kLayers + layer) * kPageElements + side +
                               (kv_head * kCachePageTokens + token) * kHeadDim);
  }
  void StoreCache() {
    slab_.resize(cache_.size() / 8);
    for (size_t i = 0; i < cache_.size(); ++i) {
      if (case_.codes) {
        reinterpret_cast<uint8_t*>(slab_.data())[i] = FloatToFp8E4M3(cache_[i]);
      } else {
        reinterpret_cast<uint16_t*>(slab_.data())[i] = FloatToBf16(cache_[i]);
      }
    }
  }

  // In double:

  Vector Head(const Vector& projected, int first, const float* norm, int position) const {
    Vector head(projected.begin() + first, projected.begin() + first + kHeadDim);
    if (norm == nullptr) return head;
    if (!case_.norms_after_rotary) head = Normalized(head, norm);
    for (size_t i = 0; i < kPairs; ++i) {
      const double angle = double{frequencies_.data()[i]} * position;
      const double x = head[i];
      const double y = head[i + kPairs];
      head[i] = x * std::cos(angle) - y * std::sin(angle);
      head[i + kPairs] = y * std::cos(angle) + x * std::sin(angle);
    }
    return case_.norms_after_rotary ? Normalized(head, norm) : head;
  }
  Vector Attention(int index, const Vector& projected, const Place& at) {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    for (int h = 0; h < kKvHeads; ++h) {
      const Vector key =
          Head(projected, (kHeads + h) * kHeadDim, layer.key_norm.data(), at.position);
      const Vector value =
          Head(projected, (kHeads + kKvHeads + h) * kHeadDim, nullptr, at.position);
      for (size_t i = 0; i < kHeadDim; ++i) {
        cache_[PlaceOf(index, at, h, false) + i] = Rounded(static_cast<float>(key[i]));
        cache_[PlaceOf(index, at, h, true) + i] = Rounded(static_cast<float>(value[i]));
      }
    }
    Vector mixed(kMixed);
    for (int h = 0; h < kHeads; ++h) {
      const Vector query = Head(projected, h * kHeadDim, layer.query_norm.data(), at.position);
      double sum = 0;
      for (int key = 0; key <= at.position; ++key) {
        const int kv_head = h / (kHeads / kKvHeads);
        const float* const k = cache_.data() + PlaceOf(index, {at.row, key}, kv_head, false);
        const float* const v = cache_.data() + PlaceOf(index, {at.row, key}, kv_head, true);
        double score = 0;
        for (size_t i = 0; i < kHeadDim; ++i) score += query[i] * k[i];
        const double weight = std::exp(score / std::sqrt(kHeadDim));
        sum += weight;
        for (size_t i = 0; i < kHeadDim; ++i) {
          mixed[static_cast<size_t>(h * kHeadDim) + i] += weight * v[i];
        }
      }
      for (size_t i = 0; i < kHeadDim; ++i) mixed[static_cast<size_t>(h * kHeadDim) + i] /= sum;
    }
    return mixed;
  }
  static double Logit(const Layer& layer, int row, const Vector& x) {
    const float* const weights = layer.router.data() + row * kFeatures;
    return std::inner_product(x.begin(), x.end(), weights, 0.0) / 16;
  }
  Vector Route(const Layer& layer, const Vector& x) {
    Vector logits;
    for (int e = 0; e < kExperts; ++e) logits.push_back(Logit(layer, e, x));
    return RouteToTwo(args_.router, logits, case_.sigmoid ? layer.choice_bias.data() : nullptr,
                      &margin_);
  }
  void RunLayer(int index, const Place& at, Vector* hidden) {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    const auto add = [&](const Vector& block, double factor) {
      for (size_t i = 0; i < kFeatures; ++i) (*hidden)[i] += factor * block[i];
    };
    const Vector projected = layer.qkv.Product(Normalized(*hidden, layer.attention_norm.data()));
    add(layer.out.Product(Attention(index, projected, at)), 1);
    const Vector x = Normalized(*hidden, layer.mlp_norm.data());
    if (index == 0) return add(layer.mlps[0].Run(x), 1);
    const Vector weights = Route(layer, x);
    for (size_t e = 0; e < kExperts; ++e) {
      if (weights[e] > 0) add(layer.mlps[e].Run(x), weights[e]);
    }
    if (layer.shared.empty()) return;
    add(layer.shared[0].Run(x), case_.gated ? Sigmoid(Logit(layer, kExperts, x)) : 1.0);
  }

  // For the kernel:

  void Describe() {
    args_.form = case_.form;
    args_.kind = case_.kind;
    args_.rows = case_.rows;
    args_.features = kFeatures;
    args_.heads = kHeads;
    args_.kv_heads = kKvHeads;
    args_.key_dim = args_.value_dim = kHeadDim;
    args_.scale = 1 / std::sqrt(static_cast<float>(kHeadDim));
    args_.frequencies = frequencies_.data();
    args_.pairs = kPairs;
    args_.key_groups = 1;
    args_.attention_layers = kLayers;
    args_.cache_bytes = case_.codes ? 1 : 2;
    args_.norms_after_rotary = case_.norms_after_rotary;
    args_.gate = {static_cast<int>(Activation::kSilu), 0.0f, 0.0f};
    args_.router = RouterToTwo(case_.sigmoid, case_.groups);
    args_.router.shared = case_.parts;
    args_.router.shared_gated = case_.gated ? 1 : 0;
    CacheGroup& group = args_.groups[0];
    group.slabs[0] = slab_.data();
    group.slab_count = 1;
    group.slab_pages = static_cast<uint32_t>(case_.rows * kCachePages);
    group.page_stride = kLayers * kPageElements;
    group.block_table = table_.data();
    group.blocks = kCachePages;
    tables_.resize(kLayers);
    experts_.resize(kLayers);
    for (int i = 0; i < kLayers; ++i) DescribeLayer(i);
    LayOut();
  }
  void DescribeLayer(int index) {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    PersistentLayer& to = tables_[static_cast<size_t>(index)];
    to.gemms[0] = layer.qkv.Gemm();
    to.gemms[1] = layer.out.Gemm();
    to.gemms[2] = layer.mlps[0].Gates();
    to.gemms[3] = layer.mlps[0].down.Gemm();
    to.attention_norm = layer.attention_norm.data();
    to.mlp_norm = layer.mlp_norm.data();
    to.attention_epsilon = to.mlp_epsilon = static_cast<float>(kEpsilon);
    to.query_epsilon = to.key_epsilon = static_cast<float>(kEpsilon);
    to.query_norm = layer.query_norm.data();
    to.key_norm = layer.key_norm.data();
    std::copy_n(to.query_norm, kHeadDim, to.head_norms[0]);
    std::copy_n(to.key_norm, kHeadDim, to.head_norms[1]);
    to.attends = 1;
    to.mixer_index = index;
    to.first_element = index * kPageElements;
    if (index > 0) DescribeExperts(index);
    for (int phase = 0; phase < kPhases; ++phase) {
      SplitPhase(static_cast<Phase>(phase), case_.blocks(), &to.gemms[phase]);
    }
    if (case_.rows > 1) SplitRows(case_.rows, args_.router, case_.blocks(), &to);
  }
  void DescribeExperts(int index) {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    PersistentLayer& to = tables_[static_cast<size_t>(index)];
    std::vector<PersistentExpert>& experts = experts_[static_cast<size_t>(index)];
    for (const Mlp& mlp : layer.mlps) experts.push_back(mlp.Expert());
    for (int i = 0; i < case_.parts; ++i) experts.push_back(layer.shared[0].Expert());
    PhaseGemm& gates = to.gemms[2];
    PhaseGemm& down = to.gemms[3];
    gates.copies = down.segments = args_.router.selected();
    down.k_tiles *= down.segments;
    if (case_.parts > 0) {
      JoinTiles(layer.shared[0].Gates(), case_.parts, &gates);
      JoinTiles(layer.shared[0].down.Gemm(), case_.parts, &down);
    }
    std::vector<float4>& rows = router_[static_cast<size_t>(index)];
    rows.resize((kExperts + 1) * kFeatures / 4);
    for (int i = 0; i < (kExperts + 1) * kFeatures; ++i) {
      reinterpret_cast<float*>(rows.data())[i] = layer.router.data()[i] / 16;
    }
    to.experts = experts.data();
    to.router = reinterpret_cast<const float*>(rows.data());
    if (case_.sigmoid) to.choice_bias = layer.choice_bias.data();
  }
  /// With the least memory in which the teams have the wanted number of warps.
  void LayOut() {
    schedules_ = ScheduleLayers(tables_, case_.blocks(), case_.rows);
    std::optional<PersistentArguments> found;
    for (int bytes = 232448; bytes > 0; bytes -= 1024) {
      found = LayOutPersistent(args_, tables_, schedules_, case_.blocks(), bytes);
      if (!found.has_value() || found->team_warps_log2 == case_.team_warps_log2) break;
    }
    ASSERT_TRUE(found.has_value());
    args_ = *found;
    args_.layers = tables_.data();
    args_.layer_count = kLayers;
    args_.end_phase = kLayers * kPhases;
    args_.schedules = schedules_.data.data();
    words_.resize(static_cast<size_t>(2 * args_.exchange.words + kClocks + 3) / 4);
    args_.words = reinterpret_cast<uint32_t*>(words_.data());
    args_.clock = args_.words + 2 * args_.exchange.words;
    args_.errors = {&record_, &any_error_};
  }

  const ModelCase case_;
  std::vector<Layer> layers_;
  Floats frequencies_;
  std::vector<float> cache_;
  std::vector<uint4> slab_;
  std::vector<int32_t> table_;       ///< [rows][kCachePages]
  std::vector<int32_t> first_rows_;  ///< A text has a row.
  PersistentArguments args_;
  std::vector<PersistentLayer> tables_;
  std::vector<std::vector<PersistentExpert>> experts_;
  std::vector<std::vector<float4>> router_;
  Schedules schedules_;
  std::vector<uint4> words_;
  ValueRecord record_;
  int any_error_ = 0;
  double margin_ = 1;  ///< Between the scores of the last selected expert and of the next one.
  std::vector<float> last_;
};

class PersistentEmulation : public ::testing::TestWithParam<ModelCase> {};

TEST_P(PersistentEmulation, IsNearToDoubleInAnyOrder) {
  Model model(GetParam());
  model.Step(150, 0);
  const std::vector<float> first = model.last();
  // Only tags differ, and the order of threads and CTAs.
  model.Step(150, 3);
  EXPECT_EQ(model.last(), first);
  if (GetParam().errs) {
    model.StepWithError(kCachePages * kCachePageTokens, 1.0f);
    model.StepWithError(-1, 1.0f);
    model.StepWithError(151, std::numeric_limits<float>::quiet_NaN());
  }
  model.Step(151, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Models, PersistentEmulation,
    ::testing::Values(
        ModelCase{.name = "token", .form = PersistentForm::kToken},
        // Some CTAs have no tiles of a phase.
        ModelCase{.name = "many_blocks", .form = PersistentForm::kToken, .least_blocks = 36},
        ModelCase{.name = "biases", .form = PersistentForm::kToken, .zeros = ZeroKind::kBiases},
        ModelCase{.name = "integers",
                  .form = PersistentForm::kToken,
                  .errs = true,
                  .kind = CodeKind::kInt4},
        ModelCase{.name = "integer_zeros",
                  .form = PersistentForm::kToken,
                  .zeros = ZeroKind::kZeros,
                  .group_size = 16,
                  .kind = CodeKind::kInt4},
        ModelCase{.name = "integer_biases",
                  .parts = 2,
                  .gated = true,
                  .zeros = ZeroKind::kBiases,
                  .group_size = 32,
                  .kind = CodeKind::kInt4,
                  .least_blocks = 36},
        ModelCase{.name = "integer_rows",
                  .form = PersistentForm::kRows,
                  .rows = 2,
                  .zeros = ZeroKind::kZeros,
                  .kind = CodeKind::kInt4},
        ModelCase{.name = "integer_more_rows",
                  .form = PersistentForm::kGeneralRows,
                  .parts = 1,
                  .rows = 3,
                  .kind = CodeKind::kInt4},
        ModelCase{.name = "integer_hybrid",
                  .form = PersistentForm::kHybrid,
                  .parts = 2,
                  .gated = true,
                  .team_warps_log2 = 3,
                  .kind = CodeKind::kInt4,
                  .least_blocks = 20},
        ModelCase{.name = "hybrid",
                  .form = PersistentForm::kHybrid,
                  .parts = 2,
                  .gated = true,
                  .team_warps_log2 = 3},
        ModelCase{.name = "rows", .form = PersistentForm::kRows, .rows = 3},
        ModelCase{.name = "gated_rows",
                  .form = PersistentForm::kGeneralRows,
                  .parts = 2,
                  .gated = true,
                  .rows = 3,
                  .errs = true},
        ModelCase{.name = "sigmoid_rows",
                  .form = PersistentForm::kGeneralRows,
                  .parts = 1,
                  .sigmoid = true,
                  .norms_after_rotary = true,
                  .rows = 2},
        ModelCase{.name = "large_teams", .sigmoid = true, .groups = 1, .team_warps_log2 = 3},
        ModelCase{.name = "wide", .parts = 2, .gated = true, .team_warps_log2 = 2, .errs = true},
        ModelCase{.name = "sigmoid",
                  .parts = 3,
                  .sigmoid = true,
                  .team_warps_log2 = 3,
                  .codes = true,
                  .norms_after_rotary = true}),
    [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace marlin::cuda
#else
TEST(PersistentEmulation, CopiesInBulk) { GTEST_SKIP() << "the kernel is for 9.0a alone"; }
#endif
