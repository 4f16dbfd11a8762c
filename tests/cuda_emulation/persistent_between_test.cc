// The persistent decode kernel between attentions that run elsewhere, on the host: an output
// projection, a dense MLP or experts, and perhaps the projections before latent attention, of both
// forms, against the same in double.
#include <gtest/gtest.h>

#if __CUDA_ARCH__ >= 900
#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "backends/cuda/persistent/persistent_kernel.cuh"
#include "backends/cuda/persistent/persistent_plan.h"
#include "base/scalars.h"
#include "cuda_emulation/emulate.h"
#include "persistent_parts.h"

namespace marlin::cuda {
namespace {

constexpr int kFeatures = 264;  ///< No multiple of a tile, nor of an n-tile.
constexpr int kMixed = 360;
constexpr int kInner = 128;
constexpr int kDenseInner = 416;
constexpr int kQueries = 172;
constexpr int kRank = 260;  ///< Features of queries before their second projection.
constexpr int kLatent = 96;
constexpr int kWide = kLatent + 16;  ///< With the part for RoPE.

/// The projections after the MLP.
enum class Projections { kNone, kDirect, kOfRank };

struct BetweenCase {
  std::string name;
  Projections projections = Projections::kDirect;
  bool dense = false;
  int parts = 2;  ///< The shared expert's.
  bool gated = false;
  bool sigmoid = true;
  int groups = 1;
  bool biases = true;
  bool bf16_mixed = false;
  int blocks = 5;
  int rows = 1;
  CodeKind kind = CodeKind::kFp4;
};

/// A run, its inputs, and what the kernel reads.
class BetweenRun {
 public:
  explicit BetweenRun(const BetweenCase& given) : case_(given) {
    const int experts = case_.dense ? 1 : kExperts;
    for (int e = 0; e < experts; ++e) {
      mlps_.emplace_back(kFeatures, case_.dense ? kDenseInner : kInner, 128,
                         static_cast<uint32_t>(100 + 3 * e), case_.kind);
    }
    if (!case_.dense) shared_.emplace_back(kFeatures, case_.parts * kInner, 64, 200, case_.kind);
    for (int i = 0; i < (kExperts + 1) * kFeatures; ++i) router_.data()[i] /= 16;
    // They differ by so little that rows select different experts, and no choice is positive.
    for (int e = 0; e < kExperts; ++e) choice_bias_.data()[e] = choice_bias_.data()[e] / 8 - 1.25F;
    Describe();
  }

  /// Runs both, and compares. `seed`: of the order of threads; `inputs`: of the hidden states.
  void Step(uint32_t inputs, uint32_t seed) {
    const int rows = case_.rows;
    Floats hidden(rows * kFeatures, inputs);
    Floats mixed(rows * kMixed + 4, inputs + 1);
    std::fill_n(mixed.data() + rows * kMixed, 4, std::numeric_limits<float>::quiet_NaN());
    std::vector<uint2> rounded(static_cast<size_t>(rows * kMixed / 4 + 1), {~0U, ~0U});
    for (int i = 0; case_.bf16_mixed && i < rows * kMixed; ++i) {
      const uint16_t bits = FloatToBf16(mixed.data()[i]);
      reinterpret_cast<uint16_t*>(rounded.data())[i] = bits;
      mixed.data()[i] = Bf16ToFloat(bits);
    }
    std::vector<Vector> wanted;
    wanted.reserve(static_cast<size_t>(rows));
    for (int row = 0; row < rows; ++row) {
      wanted.push_back(RunInDouble(RowOf(hidden, row, kFeatures), RowOf(mixed, row, kMixed)));
    }
    args_.hidden = hidden.data();
    args_.mixed = case_.bf16_mixed ? static_cast<const void*>(rounded.data()) : mixed.data();
    args_.mixed_is_bf16 = case_.bf16_mixed;
    Floats projected(rows * kQueries + 4, 1);
    Floats latent(rows * kWide + 4, 2);
    const Floats before = projected;
    const Floats latent_before = latent;
    args_.projected = projected.data();
    args_.latent = latent.data();
    const cuda_emulation::Shape shape = {dim3(static_cast<unsigned>(case_.blocks)),
                                         kPersistentBlock, args_.shared.bytes, seed};
    cuda_emulation::Prefetched().clear();
    const auto kernel =
        case_.kind == CodeKind::kInt4 ? KernelOf<CodeKind::kInt4>() : KernelOf<CodeKind::kFp4>();
    ASSERT_EQ(cuda_emulation::Emulate(kernel, shape, args_), "");
    EXPECT_EQ(any_error_, 0);
    EXPECT_GT(margin_, 0.004) << "experts that rounding may exchange";
    ExpectPrefetched();
    const bool projects = case_.projections != Projections::kNone;
    for (int row = 0; row < rows; ++row) {
      const Vector& its = wanted[static_cast<size_t>(row)];
      EXPECT_LT(Distance(hidden.data() + row * kFeatures, its), 0.01);
      if (!projects) continue;
      EXPECT_LT(Distance(projected.data() + row * kQueries, Queries(its)), 0.01);
      EXPECT_LT(Distance(latent.data() + row * kWide, Latent(its)), 0.01);
    }
    const int queries = projects ? rows * kQueries : 0;
    const int latents = projects ? rows * kWide : 0;
    EXPECT_TRUE(std::equal(before.data() + queries, before.data() + rows * kQueries + 4,
                           projected.data() + queries));
    EXPECT_TRUE(std::equal(latent_before.data() + latents, latent_before.data() + rows * kWide + 4,
                           latent.data() + latents));
    last_.assign(hidden.data(), hidden.data() + rows * kFeatures);
    last_.insert(last_.end(), projected.data(), projected.data() + queries);
    last_.insert(last_.end(), latent.data(), latent.data() + latents);
  }
  const std::vector<float>& last() const { return last_; }

 private:
  template <CodeKind kKind>
  void (*KernelOf() const)(PersistentArguments) {
    return case_.rows > 1 ? &PersistentKernel<kKind, PersistentForm::kBetweenRows>
                          : &PersistentKernel<kKind, PersistentForm::kBetween>;
  }

  using Ranges = std::vector<std::pair<const std::byte*, int>>;
  static void AddTiles(const PhaseGemm& gemm, Ranges* ranges) {
    for (int i = 0; i < gemm.strips * gemm.k_tiles; ++i) {
      const int64_t offset = TileOffset(gemm.weights, i / gemm.k_tiles, i % gemm.k_tiles);
      ranges->emplace_back(reinterpret_cast<const std::byte*>(gemm.weights.tiles + offset),
                           gemm.weights.tile_bytes);
    }
  }
  /// With one row every tile of the shared expert was requested once, and always all that comes
  /// after the run.
  void ExpectPrefetched() const {
    constexpr int kChunk = 4096;
    Ranges wanted;
    for (const AheadRange& range : args_.ahead) {
      for (int64_t at = 0; at < range.bytes; at += kChunk) {
        wanted.emplace_back(reinterpret_cast<const std::byte*>(range.data + at),
                            static_cast<int>(std::min<int64_t>(range.bytes - at, kChunk)));
      }
    }
    for (const Mlp& mlp : shared_) {
      if (case_.rows > 1) break;
      for (const Matrix* matrix : {&mlp.gate, &mlp.up, &mlp.down}) {
        AddTiles(matrix->Gemm(), &wanted);
      }
    }
    Ranges found = cuda_emulation::Prefetched();
    std::ranges::sort(wanted);
    std::ranges::sort(found);
    EXPECT_EQ(found, wanted);
  }

  // In double:

  static Vector RowOf(const Floats& rows, int row, int width) {
    return {rows.data() + row * width, rows.data() + (row + 1) * width};
  }
  double Logit(int row, const Vector& x) const {
    return std::inner_product(x.begin(), x.end(), router_.data() + row * kFeatures, 0.0);
  }
  Vector RunInDouble(Vector hidden, const Vector& mixed) {
    const auto add = [&](const Vector& block, double factor) {
      for (size_t i = 0; i < kFeatures; ++i) hidden[i] += factor * block[i];
    };
    add(out_.Product(mixed), 1);
    const Vector x = Normalized(hidden, mlp_norm_.data());
    if (case_.dense) {
      add(mlps_[0].Run(x), 1);
      return hidden;
    }
    Vector logits;
    for (int e = 0; e < kExperts; ++e) logits.push_back(Logit(e, x));
    const Vector weights =
        RouteToTwo(args_.router, logits, case_.biases ? choice_bias_.data() : nullptr, &margin_);
    for (size_t e = 0; e < kExperts; ++e) {
      if (weights[e] > 0) add(mlps_[e].Run(x), weights[e]);
    }
    add(shared_[0].Run(x), case_.gated ? Sigmoid(Logit(kExperts, x)) : 1.0);
    return hidden;
  }
  Vector Queries(const Vector& hidden) const {
    const Vector x = Normalized(hidden, attention_norm_.data());
    if (case_.projections == Projections::kDirect) return query_.Product(x);
    return second_.Product(Normalized(low_.Product(x), query_norm_.data()));
  }
  Vector Latent(const Vector& hidden) const {
    const Vector wide = latent_.Product(Normalized(hidden, attention_norm_.data()));
    Vector result = Normalized({wide.begin(), wide.begin() + kLatent}, latent_norm_.data());
    result.insert(result.end(), wide.begin() + kLatent, wide.end());
    return result;
  }

  // For the kernel:

  void Describe() {
    args_.kind = case_.kind;
    args_.form = case_.rows > 1 ? PersistentForm::kBetweenRows : PersistentForm::kBetween;
    args_.rows = case_.rows;
    args_.features = kFeatures;
    args_.ahead[0] = {reinterpret_cast<const uint8_t*>(later_.data()), 4 * 1024 * 700 + 16};
    args_.ahead[2] = {reinterpret_cast<const uint8_t*>(later_.data()) + 16, 4096};
    args_.gate = {static_cast<int>(Activation::kSilu), 0.0f, 0.0f};
    PersistentLayer& layer = tables_.emplace_back();
    layer.gemms[1] = out_.Gemm();
    layer.gemms[2] = mlps_[0].Gates();
    layer.gemms[3] = mlps_[0].down.Gemm();
    layer.mlp_norm = mlp_norm_.data();
    layer.mlp_epsilon = static_cast<float>(kEpsilon);
    if (!case_.dense) DescribeExperts(&layer);
    for (const Phase phase : {Phase::kOut, Phase::kGates, Phase::kDown}) {
      SplitPhase(phase, case_.blocks, &layer.gemms[static_cast<int>(phase)]);
    }
    if (case_.rows > 1) SplitRows(case_.rows, args_.router, case_.blocks, &layer);
    if (case_.projections != Projections::kNone) DescribeProjections();
    schedules_ = ScheduleLayers(tables_, case_.blocks, case_.rows);
    const std::optional<PersistentArguments> found =
        LayOutPersistent(args_, tables_, schedules_, case_.blocks, 150000);
    ASSERT_TRUE(found.has_value());
    args_ = *found;
    args_.layers = tables_.data();
    args_.schedules = schedules_.data.data();
    words_.resize(static_cast<size_t>(2 * args_.exchange.words + kClocks + 3) / 4);
    args_.words = reinterpret_cast<uint32_t*>(words_.data());
    args_.clock = args_.words + 2 * args_.exchange.words;
    args_.errors = {&record_, &any_error_};
  }
  void DescribeExperts(PersistentLayer* layer) {
    args_.router = RouterToTwo(case_.sigmoid, case_.groups);
    args_.router.shared = case_.parts;
    args_.router.shared_gated = case_.gated ? 1 : 0;
    for (const Mlp& mlp : mlps_) experts_.push_back(mlp.Expert());
    for (int i = 0; i < case_.parts; ++i) experts_.push_back(shared_[0].Expert());
    PhaseGemm& gates = layer->gemms[2];
    PhaseGemm& down = layer->gemms[3];
    gates.copies = down.segments = args_.router.selected();
    down.k_tiles *= down.segments;
    JoinTiles(shared_[0].Gates(), case_.parts, &gates);
    JoinTiles(shared_[0].down.Gemm(), case_.parts, &down);
    layer->experts = experts_.data();
    layer->router = router_.data();
    if (case_.biases) layer->choice_bias = choice_bias_.data();
  }
  /// As PersistentDescription::AddProjections.
  void DescribeProjections() {
    PersistentLayer& layer = tables_.emplace_back();
    const bool direct = case_.projections == Projections::kDirect;
    layer.gemms[0] = direct ? query_.Gemm() : low_.Gemm();
    const PhaseGemm latent = latent_.Gemm();
    layer.gemms[0].sides = 2;
    layer.gemms[0].up_tiles = latent.weights.tiles;
    layer.gemms[0].up_multiplier = latent.weights.multiplier;
    layer.gemms[0].up_n = kWide;
    SplitPhase(Phase::kQkv, case_.blocks, &layer.gemms[0]);
    if (!direct) {
      layer.gemms[1] = second_.Gemm();
      SplitPhase(Phase::kQkv, case_.blocks, &layer.gemms[1]);
      layer.query_norm = query_norm_.data();
      layer.query_epsilon = static_cast<float>(kEpsilon);
    }
    layer.attention_norm = attention_norm_.data();
    layer.attention_epsilon = static_cast<float>(kEpsilon);
    layer.key_norm = latent_norm_.data();
    layer.key_epsilon = static_cast<float>(kEpsilon);
    layer.latent_features = kLatent;
  }

  const BetweenCase case_;
  const Matrix out_{kMixed, kFeatures, 64, 1, ZeroKind::kNone, case_.kind};
  const Matrix query_{kFeatures, kQueries, 64, 2, ZeroKind::kNone, case_.kind};
  const Matrix low_{kFeatures, kRank, 64, 3, ZeroKind::kNone, case_.kind};
  const Matrix second_{kRank, kQueries, 128, 4, ZeroKind::kNone, case_.kind};
  const Matrix latent_{kFeatures, kWide, 64, 5, ZeroKind::kNone, case_.kind};
  const Floats mlp_norm_{kFeatures, 6, 1.0f};
  const Floats attention_norm_{kFeatures, 7, 1.0f};
  const Floats query_norm_{kRank, 8, 1.0f};
  const Floats latent_norm_{kLatent, 9, 1.0f};
  Floats choice_bias_{kExperts, 10};
  Floats router_{(kExperts + 1) * kFeatures, 11};
  const std::vector<float> later_ = std::vector<float>(1024 * 700 + 4);
  std::vector<Mlp> mlps_;  ///< One: a dense layer.
  std::vector<Mlp> shared_;
  PersistentArguments args_;
  std::vector<PersistentLayer> tables_;
  std::vector<PersistentExpert> experts_;
  Schedules schedules_;
  std::vector<uint4> words_;
  ValueRecord record_;
  int any_error_ = 0;
  double margin_ = 1;
  std::vector<float> last_;
};

class PersistentBetween : public ::testing::TestWithParam<BetweenCase> {};

TEST_P(PersistentBetween, IsNearToDoubleInAnyOrder) {
  BetweenRun run(GetParam());
  run.Step(501, 0);
  const std::vector<float> first = run.last();
  // Only tags differ, and the order of threads and CTAs.
  run.Step(501, 3);
  EXPECT_EQ(run.last(), first);
  // Clocks advance through all tags of both buffers.
  for (const uint32_t inputs : {600U, 700U, 800U}) run.Step(inputs, 0);
  run.Step(501, 4);
  EXPECT_EQ(run.last(), first);
}

INSTANTIATE_TEST_SUITE_P(
    Runs, PersistentBetween,
    ::testing::Values(
        BetweenCase{.name = "direct"},
        BetweenCase{.name = "direct_dense", .dense = true, .bf16_mixed = true},
        BetweenCase{.name = "of_rank", .projections = Projections::kOfRank, .groups = 3},
        BetweenCase{.name = "of_rank_nine_blocks",
                    .projections = Projections::kOfRank,
                    .parts = 1,
                    .gated = true,
                    .sigmoid = false,
                    .biases = false,
                    .bf16_mixed = true,
                    .blocks = 9},
        BetweenCase{.name = "integers",
                    .projections = Projections::kOfRank,
                    .biases = false,
                    .kind = CodeKind::kInt4},
        BetweenCase{.name = "integer_rows",
                    .projections = Projections::kOfRank,
                    .biases = false,
                    .rows = 2,
                    .kind = CodeKind::kInt4},
        BetweenCase{.name = "rows", .blocks = 9, .rows = 8},
        BetweenCase{.name = "rows_of_rank",
                    .projections = Projections::kOfRank,
                    .parts = 1,
                    .gated = true,
                    .sigmoid = false,
                    .biases = false,
                    .bf16_mixed = true,
                    .rows = 4},
        BetweenCase{.name = "rows_dense", .dense = true, .rows = 2},
        BetweenCase{.name = "last", .projections = Projections::kNone, .biases = false},
        BetweenCase{.name = "last_rows",
                    .projections = Projections::kNone,
                    .groups = 3,
                    .bf16_mixed = true,
                    .rows = 4},
        BetweenCase{.name = "last_dense", .projections = Projections::kNone, .dense = true}),
    [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace marlin::cuda
#else
TEST(PersistentBetween, CopiesInBulk) { GTEST_SKIP() << "the kernel is for 9.0a alone"; }
#endif
