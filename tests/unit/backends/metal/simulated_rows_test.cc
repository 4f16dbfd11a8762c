// The kernels of operations on rows in the simulator: shapes, strides and aliases that other
// devices' tests do not have, errors of operands, and what runs in one launch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
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
#include "marlin/decoder.h"
#include "marlin/quantize.h"
#include "ops/decoder/sampling.h"
#include "ops/device/device.h"
#include "plan/gemm/host_staging.h"
#include "plan/gemm/transform_columns.h"
#include "reference/decoder.h"

namespace marlin::metal::simulated_rows_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class SimulatedRows : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto driver = OpenSimulatedDriver(&launches_);
    opened_ = driver.status();
    if (!opened_.ok()) return;
    fast_math_ = (*driver)->Shape().fast_math;
    auto impl = std::make_shared<Device::Impl>(MakeMetalBackend(std::move(*driver)));
    impl->AddHost(*cpu::OpenCpu({.threads = 1}));
    backend_ = &impl->backend();
    device_ = Internals::Make<Device>(std::move(impl));
  }
  static void TearDownTestSuite() { device_.reset(); }
  void SetUp() override {
    if (!opened_.ok()) GTEST_SKIP() << opened_.message();
    launches_.clear();
  }

  std::vector<float> Gaussians(int64_t count, float deviation = 1.0F) {
    std::normal_distribution<float> normal(0.0F, deviation);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = normal(random_);
    return values;
  }
  static MutableTensorView Matrix(std::vector<float>& values, int64_t rows, int64_t columns,
                                  int64_t first = 0, int64_t stride = 0) {
    return {
        values.data() + first, DType::kF32, {rows, columns}, {stride == 0 ? columns : stride, 1}};
  }
  static TensorView Vector(const std::vector<float>& values) {
    return {values.data(), DType::kF32, {static_cast<int64_t>(values.size())}};
  }
  static TensorView Vector(const std::vector<int32_t>& values) {
    return {values.data(), DType::kI32, {static_cast<int64_t>(values.size())}};
  }
  static TensorView Vector(const std::vector<int64_t>& values) {
    return {values.data(), DType::kI64, {static_cast<int64_t>(values.size())}};
  }
  /// Every call is done by kernels, of these names.
  static std::vector<std::string> Functions() {
    std::vector<std::string> names;
    for (const SimulatedLaunch& launch : launches_) names.push_back(launch.function);
    launches_.clear();
    return names;
  }
  static std::string Error(const Status& status) {
    return std::string(status.ok() ? device_->Synchronize().message() : status.message());
  }

  std::mt19937 random_{5};
  inline static Status opened_;
  inline static std::vector<SimulatedLaunch> launches_;
  inline static bool fast_math_ = false;
  inline static const Backend* backend_ = nullptr;
  inline static std::optional<Device> device_;
};

std::vector<double> NormOf(const float* row, int64_t columns, const std::vector<float>& weight) {
  double squares = 0;
  for (int64_t i = 0; i < columns; ++i) squares += double{row[i]} * double{row[i]};
  const double factor = 1 / std::sqrt(squares / static_cast<double>(columns) + 1e-6);
  std::vector<double> normalized;
  for (int64_t i = 0; i < columns; ++i) {
    normalized.push_back(double{row[i]} * factor * double{weight[static_cast<size_t>(i)]});
  }
  return normalized;
}

// Columns on both sides of every change of the grid, also of rows that lie in other matrices.
TEST_F(SimulatedRows, NormsOfEveryWidth) {
  for (const int64_t columns : {1, 31, 512, 513, 640, 4097}) {
    for (const int64_t rows : {1, 6}) {
      const int64_t stride = 2 * columns + 3;
      std::vector<float> memory = Gaussians(rows * stride, 3.0F);
      const std::vector<float> before = memory;
      const std::vector<float> weight = Gaussians(columns);
      // From the first columns to the last ones.
      const MutableTensorView out = Matrix(memory, rows, columns, columns + 2, stride);
      ASSERT_EQ(Error(RmsNorm(*device_, Matrix(memory, rows, columns, 0, stride), Vector(weight),
                              1e-6F, out)),
                "");
      for (int64_t row = 0; row < rows; ++row) {
        const std::vector<double> want = NormOf(before.data() + row * stride, columns, weight);
        for (int64_t i = 0; i < columns; ++i) {
          const double value = want[static_cast<size_t>(i)];
          ASSERT_NEAR(double{out.As<float>()[row * stride + i]}, value, 3e-7 * std::abs(value))
              << columns << " " << row << " " << i;
        }
      }
      ASSERT_THAT(Functions(), ElementsAre("rows_norm"));
    }
  }
}

TEST_F(SimulatedRows, NormsDependOnTheirRowAlone) {
  constexpr int64_t kColumns = 700;
  std::vector<float> x = Gaussians(9 * kColumns, 2.0F);
  const std::vector<float> weight = Gaussians(kColumns);
  std::vector<float> all(x.size());
  ASSERT_EQ(Error(RmsNorm(*device_, Matrix(x, 9, kColumns), Vector(weight), 1e-6F,
                          Matrix(all, 9, kColumns))),
            "");
  for (int64_t row = 0; row < 9; ++row) {
    std::vector<float> alone(kColumns);
    ASSERT_EQ(Error(RmsNorm(*device_, Matrix(x, 1, kColumns, row * kColumns), Vector(weight), 1e-6F,
                            Matrix(alone, 1, kColumns))),
              "");
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), all.begin() + row * kColumns)) << row;
  }
}

// One launch, or where both outputs are in one matrix two, with the same bits.
TEST_F(SimulatedRows, AddRmsNormIsOneLaunch) {
  for (const int64_t columns : {40, 1500}) {
    const int64_t stride = 2 * columns;
    std::vector<float> both = Gaussians(3 * stride);
    const std::vector<float> weight = Gaussians(columns);
    std::vector<float> block = Gaussians(3 * columns);
    std::vector<float> residual;
    for (int64_t row = 0; row < 3; ++row) {
      const auto first = both.begin() + row * stride;
      residual.insert(residual.end(), first, first + columns);
    }
    std::vector<float> out(residual.size());
    ASSERT_EQ(Error(AddRmsNorm(*device_, Matrix(block, 3, columns), Matrix(residual, 3, columns),
                               Vector(weight), 1e-6F, Matrix(out, 3, columns))),
              "");
    EXPECT_THAT(Functions(), ElementsAre("rows_add_norm"));
    ASSERT_EQ(
        Error(AddRmsNorm(*device_, Matrix(block, 3, columns), Matrix(both, 3, columns, 0, stride),
                         Vector(weight), 1e-6F, Matrix(both, 3, columns, columns, stride))),
        "");
    EXPECT_THAT(Functions(), ElementsAre("rows_add_to", "rows_norm"));
    for (int64_t row = 0; row < 3; ++row) {
      const auto first = both.begin() + row * stride;
      EXPECT_TRUE(std::equal(first, first + columns, residual.begin() + row * columns));
      EXPECT_TRUE(std::equal(first + columns, first + stride, out.begin() + row * columns));
    }
  }
}

TEST_F(SimulatedRows, NumbersThatAreNotFiniteStayInTheirRows) {
  if (fast_math_) GTEST_SKIP() << "compilers may assume that there are none";
  std::vector<float> x = {1, kNan, 2, kInf, 3, -1, 3e38F, 1, 1, 2, 2, 4};
  const std::vector<float> weight = {1, 1, 1};
  ASSERT_EQ(Error(RmsNorm(*device_, Matrix(x, 4, 3), Vector(weight), 0.0F, Matrix(x, 4, 3))), "");
  EXPECT_TRUE(std::isnan(x[0]) && std::isnan(x[1]) && std::isnan(x[2]));
  EXPECT_TRUE(std::isnan(x[3]));
  EXPECT_THAT(std::vector<float>(x.begin() + 4, x.begin() + 9), Each(0.0F));
  EXPECT_NEAR(double{x[11]}, 4 / std::sqrt(8.0), 1e-6);
  std::vector<float> gate = {kNan, 1, kInf, -kInf, 30, -200};
  std::vector<float> up = {1, kNan, 2, 2, 1, 1};
  ASSERT_EQ(Error(ApplyGate(*device_, Matrix(gate, 2, 3), Matrix(up, 2, 3), Matrix(gate, 2, 3))),
            "");
  EXPECT_TRUE(std::isnan(gate[0]) && std::isnan(gate[1]));
  EXPECT_EQ(gate[2], kInf);
  EXPECT_EQ(gate[4], 30.0F);
  EXPECT_EQ(gate[5], 0.0F);
  std::vector<float> scores = {kNan, kInf, -kInf, 0};
  ASSERT_EQ(Error(ApplySigmoid(*device_, Matrix(scores, 2, 2))), "");
  EXPECT_TRUE(std::isnan(scores[0]));
  EXPECT_EQ(std::vector<float>(scores.begin() + 1, scores.end()), (std::vector<float>{1, 0, 0.5F}));
}

// Gate and up are columns of one matrix, and so may the product be.
TEST_F(SimulatedRows, GatesOfOneMatrix) {
  constexpr int64_t kColumns = 300;
  const std::vector<float> both = Gaussians(4 * 2 * kColumns, 3.0F);
  std::vector<float> copy = both;
  std::vector<float> want(4 * kColumns);
  const auto gate = [&](std::vector<float>& of) {
    return Matrix(of, 4, kColumns, 0, 2 * kColumns);
  };
  const auto up = [&](std::vector<float>& of) {
    return Matrix(of, 4, kColumns, kColumns, 2 * kColumns);
  };
  const GateOptions options = {.limit = 2.0F};
  ASSERT_EQ(Error(ApplyGate(*device_, gate(copy), up(copy), Matrix(want, 4, kColumns), options)),
            "");
  const std::vector<double> exact = reference::ApplyGate(gate(copy), up(copy), options);
  for (size_t i = 0; i < exact.size(); ++i) {
    ASSERT_NEAR(double{want[i]}, exact[i], 1e-6 * std::abs(exact[i]) + 1e-7) << i;
  }
  for (const bool in_up : {false, true}) {
    copy = both;
    const MutableTensorView out = in_up ? up(copy) : gate(copy);
    ASSERT_EQ(Error(ApplyGate(*device_, gate(copy), up(copy), out, options)), "");
    for (int64_t i = 0; i < 4 * kColumns; ++i) {
      ASSERT_EQ(out.As<float>()[i / kColumns * 2 * kColumns + i % kColumns],
                want[static_cast<size_t>(i)])
          << i;
    }
  }
  EXPECT_THAT(Functions(), Each("rows_glu"));
}

// The first wrong id is reported, whatever the order of threads; the others are looked up.
TEST_F(SimulatedRows, LookupsCheckTheirIds) {
  std::vector<float> table = Gaussians(7 * 300);
  std::vector<float> out(40 * 300);
  std::vector<int64_t> wide(40, 3);
  std::vector<int32_t> narrow(40, 6);
  ASSERT_EQ(Error(LookUpRows(*device_, Matrix(table, 7, 300), Vector(wide), Matrix(out, 40, 300))),
            "");
  EXPECT_TRUE(std::equal(table.begin() + 900, table.begin() + 1200, out.end() - 300));
  wide[39] = 7;
  wide[21] = -(int64_t{1} << 40) - 5;
  wide[30] = 99;
  EXPECT_EQ(Error(LookUpRows(*device_, Matrix(table, 7, 300), Vector(wide), Matrix(out, 40, 300))),
            "ids: expected 0..6, got -1099511627781 at 21");
  narrow[2] = 7;
  EXPECT_EQ(
      Error(LookUpRows(*device_, Matrix(table, 7, 300), Vector(narrow), Matrix(out, 40, 300))),
      "ids: expected 0..6, got 7 at 2");
  const auto weights =
      Quantize({table.data(), DType::kF32, {300, 7}, {1, 300}}, {.format = Format::kFp16});
  const PreparedWeights prepared = *Prepare(*weights, *device_);
  launches_.clear();
  EXPECT_EQ(Error(LookUpRows(*device_, prepared, Vector(narrow), Matrix(out, 40, 300))),
            "ids: expected 0..6, got 7 at 2");
  EXPECT_EQ(Error(LookUpRows(*device_, prepared, Vector(wide), Matrix(out, 40, 300))),
            "ids: expected 0..6, got -1099511627781 at 21");
  std::fill(wide.begin(), wide.end(), 6);
  // A word that has reported is clean again.
  ASSERT_EQ(Error(LookUpRows(*device_, prepared, Vector(wide), Matrix(out, 40, 300))), "");
  EXPECT_NEAR(double{out[39 * 300 + 1]}, double{table[6 * 300 + 1]}, 2e-3);
  EXPECT_THAT(Functions(), Each("marlin_look_up"));
}

// Angles of the largest positions, and frequencies of every size.
TEST_F(SimulatedRows, AnglesOfAllPositions) {
  const std::vector<float> frequencies = {1.0F,   0.5F,    0.9999F, 1e-3F, 1e-7F, 2e-38F,
                                          -0.25F, 0x1p-9F, 3.75F,   0.0F,  17.0F, 1e-12F};
  const std::vector<int64_t> positions = {0,       1,          2,          3,        4095,
                                          1 << 20, 16'777'215, 16'777'217, 99999999, 2147483647};
  const auto pairs = static_cast<int64_t>(frequencies.size());
  const auto tokens = static_cast<int64_t>(positions.size());
  std::vector<float> x;
  for (int64_t i = 0; i < tokens * pairs; ++i) x.insert(x.end(), {1.0F, 0.0F});
  const MutableTensorView heads(x.data(), DType::kF32, {tokens, 1, 2 * pairs});
  const RotaryEmbedding rotary{Vector(frequencies), 1.0F, true};
  ASSERT_EQ(Error(ApplyRotary(*device_, rotary, Vector(positions), heads)), "");
  for (size_t t = 0; t < positions.size(); ++t) {
    for (size_t i = 0; i < frequencies.size(); ++i) {
      const long double angle =
          static_cast<long double>(frequencies[i]) * static_cast<long double>(positions[t]);
      const size_t at = 2 * (t * frequencies.size() + i);
      ASSERT_NEAR(double{x[at]}, static_cast<double>(std::cos(angle)), 1.5e-7) << t << " " << i;
      ASSERT_NEAR(double{x[at + 1]}, static_cast<double>(std::sin(angle)), 1.5e-7) << t << " " << i;
    }
  }
  // Small angles keep their own precision.
  EXPECT_NEAR(double{x[2 * (frequencies.size() + 4) + 1]}, 1e-7, 1e-14);
  EXPECT_EQ(Error(ApplyRotary(*device_, rotary, Vector(std::vector<int32_t>(10, -3)), heads)),
            "positions: expected 0 or more, got -3 at 0");
  EXPECT_EQ(Error(ApplyRotary(*device_, rotary,
                              Vector(std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 1LL << 31, -1}),
                              heads)),
            "positions: expected 0..2147483647, got 2147483648 at 8");
}

/// Rows of two sequences in a cache of two slabs, of which the second has an unallocated neighbour.
struct Cached {
  explicit Cached(DType cache_type, const std::vector<float>& projections)
      : type(cache_type), projected(projections) {
    for (auto& slab : memory) slab.assign(static_cast<size_t>(2 * kPage * DTypeBytes(type)), 0x5a);
    slabs = {memory[0].data(), nullptr, memory[1].data()};
  }
  static constexpr int64_t kHeads = 3;
  static constexpr int64_t kKvHeads = 2;
  static constexpr int64_t kDim = 40;
  static constexpr int64_t kRows = 4;
  static constexpr int64_t kPageTokens = 256;
  static constexpr int64_t kPage = 2 * kKvHeads * kPageTokens * kDim;
  static constexpr int64_t kStride = (kHeads + 2 * kKvHeads) * kDim;

  MutableTensorView Part(int64_t first, int64_t heads) {
    return {projected.data() + first * kDim, DType::kF32, {kRows, heads, kDim}, {kStride, kDim, 1}};
  }
  SequenceRows rows() const {
    return {{positions.data(), DType::kI32, {kRows}},
            {first_rows.data(), DType::kI32, {3}},
            {tables.data(), DType::kI32, {2, 2}}};
  }
  PagedCache cache() const {
    return {{slabs.data(), 3}, 2, kPage, 0, type, kPageTokens, kKvHeads, kDim, kDim};
  }
  Status Run(const Device& device, const HeadNorms& norms, const RotaryEmbedding& rotary) {
    return RotateAndAppend(device, {Part(0, kHeads), Part(kHeads, kKvHeads), Part(5, kKvHeads)},
                           norms, rotary, rows(), cache());
  }

  DType type;
  std::vector<float> projected;
  std::vector<uint8_t> memory[2];
  std::vector<void*> slabs;
  std::vector<int32_t> positions = {254, 255, 256, 1};
  std::vector<int32_t> first_rows = {0, 3, 4};
  std::vector<int32_t> tables = {5, 0, 4, 77};
};

// All heads of all rows in one launch, with the bits of the operations that it replaces.
TEST_F(SimulatedRows, RotateAndAppendIsOneLaunch) {
  const std::vector<float> projections = Gaussians(Cached::kRows * Cached::kStride, 2.0F);
  const std::vector<float> norm = Gaussians(Cached::kDim);
  const std::vector<float> frequencies = {1.0F, 0.3F, 0.1F, 0.01F, 0.003F};
  const HeadNorms norms = {Vector(norm), Vector(norm), 1e-6F};
  const RotaryEmbedding rotary{Vector(frequencies), 1.5F};
  for (const DType type : {DType::kF32, DType::kBf16, DType::kF16, DType::kF8E4M3}) {
    Cached fused(type, projections);
    Cached unfused(type, projections);
    launches_.clear();
    ASSERT_EQ(Error(fused.Run(*device_, norms, rotary)), "");
    EXPECT_THAT(Functions(), ElementsAre("rotate_append"));
    const MutableTensorView keys = unfused.Part(3, 2);
    for (const MutableTensorView& x : {unfused.Part(0, 3), keys}) {
      ASSERT_EQ(Error(RmsNorm(*device_, x, Vector(norm), 1e-6F, x)), "");
      ASSERT_EQ(Error(ApplyRotary(*device_, rotary, unfused.rows().positions, x)), "");
    }
    ASSERT_EQ(
        Error(AppendToCache(*device_, keys, unfused.Part(5, 2), unfused.rows(), unfused.cache())),
        "");
    for (int64_t i = 0; i < Cached::kRows * Cached::kStride; ++i) {
      if (i % Cached::kStride >= 3 * Cached::kDim) continue;  // Keys are unspecified.
      ASSERT_EQ(fused.projected[static_cast<size_t>(i)], unfused.projected[static_cast<size_t>(i)]);
    }
    EXPECT_EQ(fused.memory[0], unfused.memory[0]);
    EXPECT_EQ(fused.memory[1], unfused.memory[1]);
    EXPECT_NE(fused.memory[1], Cached(type, projections).memory[1]);
  }
}

// Messages name what the CPU's do, and wrong values are not followed.
TEST_F(SimulatedRows, AppendsCheckTheirRows) {
  const Device cpu = *Device::Open("cpu", {.threads = 1});
  const std::vector<float> projections = Gaussians(Cached::kRows * Cached::kStride);
  const auto expect_error = [&](auto&& change, const std::string& text) {
    Cached cached(DType::kBf16, projections);
    change(cached);
    const std::string message = Error(cached.Run(*device_, {}, {}));
    EXPECT_THAT(message, HasSubstr(text));
    EXPECT_EQ(message, cached.Run(cpu, {}, {}).message());
  };
  expect_error([](Cached& c) { c.positions[1] = 7; }, "positions: expected 255, got 7 at 1");
  expect_error([](Cached& c) { c.positions[2] = c.positions[1]; }, "got 255 at 2");
  expect_error([](Cached& c) { c.positions[3] = -8; }, "expected 0 or more, got -8 at 3");
  expect_error(
      [](Cached& c) {
        c.positions = {510, 511, 512, 1};
      },
      "position 512 is in block 2 of 2");
  expect_error([](Cached& c) { c.positions[3] = 512; }, "position 512 is in block 2 of 2");
  expect_error([](Cached& c) { c.tables[1] = 2; }, "no page 2 for block 1 of sequence 0");
  expect_error([](Cached& c) { c.tables[2] = -1; }, "no page -1 for block 0 of sequence 1");
  expect_error([](Cached& c) { c.tables[0] = 1 << 30; }, "no page 1073741824");
  expect_error([](Cached& c) { c.first_rows = {0, 3, 3}; }, "first_rows: expected to ascend");
  expect_error([](Cached& c) { c.first_rows = {1, 3, 4}; }, "first_rows: expected to ascend");
  expect_error([](Cached& c) { c.first_rows = {0, 9, 4}; }, "first_rows: expected to ascend");
}

// Every number that rounds to a code, and those between them.
TEST_F(SimulatedRows, Fp8CachesRoundAsTheFormatDoes) {
  std::vector<float> values = {0.0F, -0.0F, kNan, kInf, -kInf, 1e-30F, 3e38F, 448, 463, 465, -500};
  for (int code = 0; code < 0x7e; ++code) {
    const float low = Fp8E4M3ToFloat(static_cast<uint8_t>(code));
    const float high = Fp8E4M3ToFloat(static_cast<uint8_t>(code + 1));
    const float middle = (low + high) / 2;
    values.insert(values.end(),
                  {-low, middle, std::nextafter(middle, 0.0F), -std::nextafter(middle, high)});
  }
  const auto count = static_cast<int64_t>(values.size());
  std::vector<uint8_t> memory(static_cast<size_t>(256 * count));
  void* slab = memory.data();
  const std::vector<int32_t> position = {0};
  const std::vector<int32_t> first_rows = {0, 1};
  const PagedCache cache = {{&slab, 1}, 1, 256 * count, 0,     DType::kF8E4M3,
                            256,        1, count,       count, true};
  const SequenceRows rows = {
      Vector(position), Vector(first_rows), {position.data(), DType::kI32, {1, 1}}};
  ASSERT_EQ(
      Error(AppendToCache(*device_, {values.data(), DType::kF32, {1, 1, count}}, {}, rows, cache)),
      "");
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(int{memory[i]}, int{FloatToFp8E4M3(values[i])}) << values[i];
  }
  EXPECT_THAT(Functions(), ElementsAre("rotate_append"));
}

TEST_F(SimulatedRows, AdvanceReportsTheFirstCount) {
  constexpr int64_t kRows = 700;
  const std::vector<int32_t> sampled(kRows, 5);
  const std::vector<int32_t> stops = {9};
  std::vector<int32_t> vectors[4];
  for (auto& vector : vectors) vector.assign(kRows, 0);
  std::vector<int32_t> tokens(2 * kRows, -1);
  const auto view = [](std::vector<int32_t>& of) {
    return MutableTensorView(of.data(), DType::kI32, {kRows});
  };
  const StepAdvance advance = {Vector(stops),    view(vectors[0]),
                               view(vectors[1]), view(vectors[2]),
                               view(vectors[3]), {tokens.data(), DType::kI32, {kRows, 2}}};
  vectors[3][650] = 2;
  vectors[3][300] = -4;
  EXPECT_EQ(Error(AdvanceTokens(*device_, Vector(sampled), advance)),
            "counts: expected 0..1, got -4 at 300");
  EXPECT_EQ(vectors[1][299], 1);
  EXPECT_EQ(vectors[1][300], 0);
  EXPECT_EQ(Error(AdvanceTokens(*device_, Vector(sampled), advance)), "");
  EXPECT_EQ(vectors[3][0], 2);
  EXPECT_THAT(Functions(), ElementsAre("rows_advance", "rows_advance"));
}

// The backend's operations have the bits of the host's.
TEST_F(SimulatedRows, AddsRows) {
  std::vector<float> sums = Gaussians(5 * 130);
  const std::vector<float> rows = Gaussians(2 * 130);
  const std::vector<int32_t> slots = {-1, 1, 0, -1, 1};
  for (const bool has_sum : {false, true}) {
    for (const bool has_rows : {false, true}) {
      AddRowsCall call;
      call.sum = has_sum ? sums.data() : nullptr;
      call.rows = has_rows ? rows.data() : nullptr;
      call.slot_of = has_rows ? slots.data() : nullptr;
      call.slots = has_rows ? 2 : 0;
      call.tokens = 5;
      call.width = 130;
      call.out_stride = 131;
      call.out_type = DType::kBf16;
      std::vector<uint16_t> out(5 * 131);
      std::vector<uint16_t> want = out;
      call.out = out.data();
      ASSERT_TRUE(backend_->AddRows(call, nullptr).ok());
      call.out = want.data();
      ASSERT_TRUE(backend_->Backend::AddRows(call, nullptr).ok());
      EXPECT_EQ(out, want);
    }
  }
  EXPECT_THAT(Functions(), ElementsAre("rows_add", "rows_add", "rows_add", "rows_add"));
}

TEST_F(SimulatedRows, TransformsColumns) {
  const auto expect_bits = [&](int64_t columns, int64_t hadamard, bool scales, bool moves,
                               bool transposed) {
    const std::vector<float> scale = Gaussians(columns);
    std::vector<int32_t> permutation(static_cast<size_t>(columns));
    for (size_t i = 0; i < permutation.size(); ++i) permutation[i] = static_cast<int32_t>(i);
    std::shuffle(permutation.begin(), permutation.end(), random_);
    const InputTransform transform = {scales ? scale.data() : nullptr, hadamard,
                                      moves ? permutation.data() : nullptr};
    std::vector<float> from = Gaussians(3 * columns);
    const auto view = [&](std::vector<float>& of) {
      return transposed ? MutableTensorView(of.data(), DType::kF32, {3, columns}, {1, 3})
                        : Matrix(of, 3, columns);
    };
    for (const bool inverse : {false, true}) {
      std::vector<float> out(from.size());
      std::vector<float> want(from.size());
      ASSERT_TRUE(
          backend_->TransformColumns({view(from), view(out), transform, inverse}, nullptr).ok());
      ASSERT_TRUE(TransformRows({view(from), view(want), transform, inverse}, 0, 3).ok());
      EXPECT_EQ(out, want) << columns << " " << hadamard;
    }
  };
  for (const bool transposed : {false, true}) {
    expect_bits(300, 0, false, true, transposed);
    expect_bits(300, 0, true, true, transposed);
    expect_bits(30, 0, true, false, transposed);
    expect_bits(4096 + 64, 64, true, false, transposed);
  }
  expect_bits(4, 2, false, false, false);
  expect_bits(8192, 4096, true, false, false);
  launches_.clear();
  // Left to the host.
  expect_bits(8192, 8192, true, false, false);
  expect_bits(64, 32, true, true, false);
  EXPECT_TRUE(launches_.empty());
}

}  // namespace
}  // namespace marlin::metal::simulated_rows_test
