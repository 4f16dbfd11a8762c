// The persistent decode kernel with rows: next tokens of one sequence, or of several.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backends/cuda/common/tile_gemm.h"
#include "backends/cuda/persistent/persistent_kernel.cuh"
#include "backends/cuda/persistent/persistent_plan.h"
#include "cuda_emulation/emulate.h"
#include "tiled_weights.h"

namespace marlin::cuda::persistent_rows_test {
namespace {

constexpr int kSharedBytes = 227 * 1024;
constexpr int kHidden = 128;
constexpr int kInner = 256;
constexpr int kHeads = 4;
constexpr int kKeyDim = 64;
constexpr int kLayers = 2;

/// CTAs, of which every row has one at least.
int BlocksFor(int rows) { return std::max(rows, 6); }

/// A next token of a sequence.
struct Row {
  int sequence;
  int position;
};

struct Step {
  std::vector<float> hidden;
  ValueError error = ValueError::kNone;
};

struct Kind {
  int cache_bytes = 2;
  int kv_heads = 1;
  bool interleaved = false;
  int window = 21;
};

struct StepOptions {
  bool alone = false;                    ///< Each row is a sequence of its own, of the same pages.
  uint32_t seed = 0;                     ///< The order of threads.
  std::vector<int32_t> first_rows = {};  ///< Wrong ones.
};

/// A model of two layers, in two cache groups, of which the second one has a window.
class Model {
 public:
  static constexpr int kSequences = 3;  ///< One more has no pages.
  static constexpr int kTableBlocks = 4;
  static constexpr int kTokens = kTableBlocks * kCachePageTokens;

  explicit Model(const Kind& kind) : kind_(kind) {
    uint32_t seed = 3;
    const int projected = (kHeads + 2 * kind.kv_heads) * kKeyDim;
    for (int layer = 0; layer < kLayers; ++layer) {
      for (const auto& [k, n] :
           {std::pair(kHidden, projected), std::pair(kHeads * kKeyDim, kHidden),
            std::pair(kHidden, kInner), std::pair(kHidden, kInner), std::pair(kInner, kHidden)}) {
        weights_.push_back(std::make_unique<TiledWeights>(WeightsShape{.k = k, .n = n}, ++seed));
      }
    }
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    norms_.resize(kHidden);
    for (float& weight : norms_) weight = 1 + 0.1f * normal(random);
    for (int pair = 0; pair < kKeyDim / 2; ++pair) {
      frequencies_.push_back(std::pow(10000.0f, -2.0f * static_cast<float>(pair) / kKeyDim));
    }
    cache_.resize(2 * static_cast<size_t>(GroupElements()));
    for (uint16_t& element : cache_) {
      element = kind.cache_bytes == 2 ? FloatToBf16(normal(random)) : random() & 0x3f3f;
    }
  }

  const std::vector<uint16_t>& cache() const { return cache_; }

  /// A step of rows, adjacent ones of a sequence. Changes the caches.
  Step Run(const std::vector<Row>& rows, const StepOptions& options = {}) {
    const auto count = static_cast<int>(rows.size());
    std::vector<PersistentLayer> layers = Layers(count);
    const Schedules schedules = ScheduleLayers(layers, BlocksFor(count), count);
    const auto laid_out =
        LayOutPersistent(Shape(count), layers, schedules, BlocksFor(count), kSharedBytes - 1024);
    EXPECT_TRUE(laid_out.has_value());
    PersistentArguments args = *laid_out;
    const std::vector<uint4> schedule_memory = Aligned(schedules.data);
    const std::vector<uint4> layer_memory =
        Aligned({reinterpret_cast<const uint8_t*>(layers.data()),
                 reinterpret_cast<const uint8_t*>(layers.data() + layers.size())});
    args.layers = reinterpret_cast<const PersistentLayer*>(layer_memory.data());
    args.layer_count = kLayers;
    args.end_phase = kLayers * kPhases;
    args.schedules = reinterpret_cast<const uint8_t*>(schedule_memory.data());
    Step step;
    std::vector<int32_t> positions;
    std::vector<int32_t> first_rows;
    std::vector<int32_t> tables;
    for (int row = 0; row < count; ++row) {
      const auto& [sequence, position] = rows[static_cast<size_t>(row)];
      positions.push_back(position);
      for (int i = 0; i < kHidden; ++i) step.hidden.push_back(Embedding(sequence, position, i));
      if (row > 0 && !options.alone && sequence == rows[static_cast<size_t>(row) - 1].sequence) {
        continue;
      }
      first_rows.push_back(row);
      for (int block = 0; block < kTableBlocks; ++block) {
        tables.push_back(sequence < kSequences ? sequence * kTableBlocks + block : -1);
      }
    }
    args.sequences = static_cast<int>(first_rows.size());
    first_rows.push_back(count);
    if (!options.first_rows.empty()) first_rows = options.first_rows;
    args.hidden = step.hidden.data();
    args.position = positions.data();
    args.first_rows = first_rows.data();
    for (int group = 0; group < 2; ++group) {
      CacheGroup& to = args.groups[group];
      to.window = group == 1 ? kind_.window : 0;
      to.slabs[0] = cache_.data() + group * GroupElements();
      to.slab_count = 1;
      to.slab_pages = kSequences * kTableBlocks;
      to.page_stride = PageElements();
      to.block_table = tables.data();
      to.blocks = kTableBlocks;
    }
    step.error = Launch(args, options.seed);
    return step;
  }

 private:
  /// The error that it recorded.
  ValueError Launch(PersistentArguments& args, uint32_t seed) {
    // Every number of rows has exchange buffers of its own, which stay from step to step.
    std::vector<uint4>& words = words_[args.rows];
    words.resize(static_cast<size_t>(2 * args.exchange.words + kClocks + 3) / 4);
    args.words = reinterpret_cast<uint32_t*>(words.data());
    args.clock = args.words + 2 * args.exchange.words;
    ValueRecord record;
    int any = 0;
    args.errors = {&record, &any};
    auto* const kernel = args.rows > 1 ? &PersistentKernel<CodeKind::kFp4, PersistentForm::kRows>
                                       : &PersistentKernel<CodeKind::kFp4, PersistentForm::kToken>;
    EXPECT_EQ(cuda_emulation::Emulate(kernel,
                                      {dim3(static_cast<unsigned>(BlocksFor(args.rows))),
                                       dim3(kPersistentBlock), args.shared.bytes, seed},
                                      args),
              "");
    return static_cast<ValueError>(record.value_error);
  }

  int PageElements() const { return kCachePageTokens * kind_.kv_heads * 2 * kKeyDim; }
  /// A cache group's numbers of two bytes.
  int GroupElements() const {
    return kSequences * kTableBlocks * PageElements() / (2 / kind_.cache_bytes);
  }

  static std::vector<uint4> Aligned(const std::vector<uint8_t>& bytes) {
    std::vector<uint4> memory((bytes.size() + 15) / 16);
    std::memcpy(memory.data(), bytes.data(), bytes.size());
    return memory;
  }

  static float Embedding(int sequence, int position, int feature) {
    return static_cast<float>(
        std::sin((position % 1000 * 37.0 + sequence * 11 + 5) * (feature + 3)));
  }

  PersistentArguments Shape(int rows) const {
    PersistentArguments args;
    args.form = rows > 1 ? PersistentForm::kRows : PersistentForm::kToken;
    args.rows = rows;
    args.features = kHidden;
    args.heads = kHeads;
    args.kv_heads = kind_.kv_heads;
    args.key_dim = kKeyDim;
    args.value_dim = kKeyDim;
    args.scale = 0.125f;
    args.frequencies = frequencies_.data();
    args.pairs = kKeyDim / 2;
    args.key_groups = 3;
    args.attention_layers = kLayers;
    args.cache_bytes = kind_.cache_bytes;
    args.interleaved = kind_.interleaved;
    return args;
  }

  PhaseGemm Gemm(Phase phase, int rows, const TiledWeights& weights,
                 const TiledWeights* up = nullptr) const {
    PhaseGemm gemm;
    gemm.weights = weights.view();
    // Outputs of inputs of size 1 are of size 1.
    const float scale = 0.06f / std::sqrt(static_cast<float>(gemm.weights.k));
    gemm.weights.multiplier = weights.Multiplier(true) * scale;
    gemm.use = UseOf(gemm.weights, CodeKind::kFp4);
    gemm.n = gemm.weights.n;
    gemm.strips = (gemm.n + kStripOutputs - 1) / kStripOutputs;
    gemm.k_tiles = gemm.weights.tiles_of_strip;
    if (up != nullptr) {
      gemm.sides = 2;
      gemm.up_tiles = up->view().tiles;
      gemm.up_multiplier = up->Multiplier(true) * scale;
    }
    SplitPhase(phase, BlocksFor(rows), &gemm);
    return gemm;
  }

  std::vector<PersistentLayer> Layers(int rows) const {
    std::vector<PersistentLayer> layers(kLayers);
    for (int i = 0; i < kLayers; ++i) {
      PersistentLayer& layer = layers[static_cast<size_t>(i)];
      const auto weights = [&](int which) -> const TiledWeights& {
        const int number = 5 * i + which;
        return *weights_[static_cast<size_t>(number)];
      };
      layer.gemms[0] = Gemm(Phase::kQkv, rows, weights(0));
      layer.gemms[1] = Gemm(Phase::kOut, rows, weights(1));
      layer.gemms[2] = Gemm(Phase::kGates, rows, weights(2), &weights(3));
      layer.gemms[3] = Gemm(Phase::kDown, rows, weights(4));
      layer.attention_norm = norms_.data();
      layer.mlp_norm = norms_.data();
      layer.attention_epsilon = layer.mlp_epsilon = 1e-5f;
      layer.query_norm = layer.key_norm = norms_.data();
      layer.query_epsilon = layer.key_epsilon = 1e-5f;
      for (auto& norm : layer.head_norms) std::copy_n(norms_.begin(), kKeyDim, norm);
      layer.cache_group = i;
      layer.mixer_index = i;
      layer.attends = 1;
      if (rows > 1) SplitRows(rows, {}, BlocksFor(rows), &layer);
    }
    return layers;
  }

  const Kind kind_;
  std::vector<std::unique_ptr<TiledWeights>> weights_;
  std::vector<float> norms_;
  std::vector<float> frequencies_;
  std::vector<uint16_t> cache_;  ///< Both groups'.
  std::map<int, std::vector<uint4>> words_;
};

std::vector<Row> Rows(int sequence, int first, int count) {
  std::vector<Row> rows(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) rows[static_cast<size_t>(i)] = {sequence, first + i};
  return rows;
}
std::vector<Row> operator+(std::vector<Row> a, const std::vector<Row>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

double Distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0;
  double size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(double{a[i]} - double{b[i]}, 2);
    size += std::pow(double{b[i]}, 2);
  }
  return std::sqrt(difference / size);
}

/// Rows of one sequence have the bits of rows which find the earlier ones' keys in the cache, and
/// nearly the values of the kernel of one token, one after another.
void Compare(const Kind& kind, const std::vector<Row>& rows) {
  SCOPED_TRACE(rows.size());
  Model together(kind);
  const Step step = together.Run(rows);
  EXPECT_EQ(step.error, ValueError::kNone);
  const std::vector<uint16_t> cached = together.cache();

  Model one_by_one(kind);
  std::vector<float> hidden;
  for (const Row& row : rows) {
    const Step one = one_by_one.Run({row});
    EXPECT_EQ(one.error, ValueError::kNone);
    hidden.insert(hidden.end(), one.hidden.begin(), one.hidden.end());
  }
  EXPECT_LT(Distance(step.hidden, hidden), 1e-3);

  EXPECT_EQ(together.Run(rows, {.alone = true}).hidden, step.hidden);
  EXPECT_EQ(together.cache(), cached);
}

class PersistentRows : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!kHasTma) GTEST_SKIP() << "no bulk copies";
  }
};

TEST_F(PersistentRows, OfOneSequenceCrossBlocksAndPages) {
  Compare({}, Rows(0, 0, 2));
  Compare({}, Rows(1, 62, 3));
  // The first row of the second page and split; then in the second block of a team.
  Compare({}, Rows(0, 127, 2));
  Compare({}, Rows(0, 185, 8));
}

TEST_F(PersistentRows, OfSeveralSequences) {
  Compare({.kv_heads = 2}, Rows(0, 126, 2) + Rows(2, 40, 1));
  Compare({.window = 2}, Rows(1, 63, 3) + Rows(0, 142, 2) + Rows(2, 0, 1));
}

TEST_F(PersistentRows, OfCodes) {
  Compare({.cache_bytes = 1, .interleaved = true}, Rows(2, 30, 3));
  Compare({.cache_bytes = 1}, Rows(0, 126, 4) + Rows(1, 16, 2));
}

TEST_F(PersistentRows, TheOrderOfThreadsDoesNotMatter) {
  const std::vector<Row> rows = Rows(1, 140, 3) + Rows(0, 15, 2);
  for (const int bytes : {2, 1}) {
    const Step step = Model({.cache_bytes = bytes}).Run(rows);
    EXPECT_EQ(Model({.cache_bytes = bytes}).Run(rows, {.seed = 1}).hidden, step.hidden);
  }
}

/// Wrong values are recorded, and the step ends.
TEST_F(PersistentRows, WrongValuesAreRecorded) {
  const auto error = [](const std::vector<Row>& rows, const StepOptions& options = {}) {
    return Model({}).Run(rows, options).error;
  };
  EXPECT_EQ(error({{0, 40}, {0, 42}}), ValueError::kNextPosition);
  EXPECT_EQ(error({{0, 40}, {0, 40}, {0, 3}}), ValueError::kNextPosition);
  EXPECT_EQ(error({{0, INT32_MIN}, {1, 0}}), ValueError::kPosition);
  EXPECT_EQ(error({{0, 3}, {0, INT32_MIN}}), ValueError::kPosition);
  EXPECT_EQ(error(Rows(0, Model::kTokens - 1, 2)), ValueError::kBlock);
  EXPECT_EQ(error(Rows(0, INT32_MAX - 1, 2)), ValueError::kBlock);
  EXPECT_EQ(error(Rows(Model::kSequences, 70, 2)), ValueError::kPage);
  for (const std::vector<int32_t>& first_rows :
       {std::vector{1, 2}, {0, INT32_MAX}, {INT32_MIN, INT32_MIN}}) {
    EXPECT_EQ(error(Rows(0, 20, 2), {.first_rows = first_rows}), ValueError::kFirstRows);
  }
}

}  // namespace
}  // namespace marlin::cuda::persistent_rows_test
