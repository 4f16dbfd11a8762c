// Attention against its double-precision reference, on every ISA level of this CPU.
#include <gmock/gmock.h>

#include <algorithm>
#include <limits>

#include "decoder_fixture.h"
#include "marlin/decoder.h"

namespace marlin::attention_test {
namespace {

using ::testing::HasSubstr;

using AttentionOnEveryLevel = OnEveryLevel;
MARLIN_ON_EVERY_LEVEL(AttentionOnEveryLevel);

struct AttentionShape {
  int64_t tokens, length, heads, kv_heads, depth, width;
};

// Sizes around the block of 32 keys, the segment of 256, tiles of 1, 2 and 4 rows, tasks of 64
// rows, and head sizes that are not a multiple of a vector.
constexpr AttentionShape kShapes[] = {
    {1, 1, 1, 1, 16, 16},     {1, 2, 2, 1, 17, 15},     {1, 31, 4, 2, 32, 32},
    {1, 32, 4, 4, 64, 64},    {1, 33, 8, 2, 80, 80},    {1, 255, 6, 2, 96, 96},
    {1, 256, 8, 1, 128, 128}, {1, 257, 5, 5, 192, 128}, {1, 513, 16, 2, 64, 32},
    {2, 300, 12, 4, 48, 40},  {3, 770, 7, 1, 33, 65},   {4, 1030, 10, 2, 64, 64},
    {5, 5, 4, 2, 128, 128},   {8, 40, 32, 1, 16, 16},   {31, 31, 2, 2, 32, 32},
    {33, 64, 2, 1, 40, 24},   {64, 320, 3, 3, 80, 80},  {65, 65, 4, 4, 112, 112},
    {70, 600, 4, 2, 7, 3},    {66, 66, 2, 1, 256, 256}, {2, 9, 16, 1, 576, 512},
    {1, 40, 128, 1, 192, 128}};

/// Queries, keys, values and the output.
struct Problem {
  Tensor q, k, v, out;
  std::vector<float> sinks;
  AttentionOptions options;

  AttentionInput input() { return {q.view(), k.view(), v.view(), out.view()}; }
};

/// Types, layouts, window and sinks of case `seed`.
Problem MakeProblem(const AttentionShape& s, DType q_type, DType kv_type, unsigned seed) {
  const Shape keys{s.length, s.kv_heads, s.depth};
  const Shape values{s.length, s.kv_heads, s.width};
  const bool by_head = seed % 2 == 0;
  Problem p{Tensor(q_type, {s.tokens, s.heads, s.depth}, seed % 3),
            by_head ? Tensor::ByHead(kv_type, keys) : Tensor(kv_type, keys, seed % 5),
            by_head ? Tensor::ByHead(kv_type, values) : Tensor(kv_type, values),
            Tensor(q_type, {s.tokens, s.heads, s.width}, seed % 4),
            std::vector<float>(static_cast<size_t>(s.heads), 0.7F),
            {}};
  p.q.Fill(seed, 1.5);
  p.k.Fill(seed + 1000, 1.5);
  p.v.Fill(seed + 2000);
  constexpr int64_t kWindows[] = {0, 1, 16, 33, 300};
  p.options.window = kWindows[seed % 5];
  p.options.chunked = seed % 4 == 1;
  if (seed % 3 == 0) p.options.scale = 0.2F;
  if (seed % 7 < 3) p.options.sinks = {p.sinks.data(), DType::kF32, {s.heads}};
  return p;
}

Tensor Absolute(Tensor& from) {
  const TensorView view = from.view();
  Tensor to(DType::kF32, view.shape());
  const std::vector<double> elements = reference::Elements(view);
  for (size_t i = 0; i < elements.size(); ++i) {
    to.Set(static_cast<int64_t>(i), static_cast<float>(std::abs(elements[i])));
  }
  return to;
}

/// Returns the largest scale * |q| . |k| over all keys, per row.
std::vector<double> LargestSums(Problem& p) {
  const TensorView q = p.q.view();
  const TensorView k = p.k.view();
  const std::vector<double> a = reference::Elements(q);
  const std::vector<double> b = reference::Elements(k);
  const auto heads = static_cast<size_t>(q.dim(1));
  const auto depth = static_cast<size_t>(q.dim(2));
  const auto kv_heads = static_cast<size_t>(k.dim(1));
  const double scale = p.options.scale != 0 ? static_cast<double>(p.options.scale)
                                            : 1 / std::sqrt(static_cast<double>(depth));
  std::vector<double> largest(static_cast<size_t>(q.dim(0)) * heads);
  for (size_t row = 0; row < largest.size(); ++row) {
    const size_t kv_head = row % heads / (heads / kv_heads);
    for (size_t key = 0; key < static_cast<size_t>(k.dim(0)); ++key) {
      double sum = 0;
      for (size_t d = 0; d < depth; ++d) {
        sum += std::abs(a[row * depth + d] * b[(key * kv_heads + kv_head) * depth + d]);
      }
      largest[row] = std::max(largest[row], scale * sum);
    }
  }
  return largest;
}

/// Half a ULP of a type, at least that of its subnormals.
double RoundingOf(DType dtype, double value) {
  return std::max(Unit(dtype) / 2 * std::abs(value), dtype == DType::kF16 ? 0x1p-25 : 0x1p-149);
}

/// The error model of docs/kernels/cpu-decoder.md: a score has depth + 8 roundings of its absolute
/// sum, a weight twice as many, an output element as many as a segment has keys plus the number of
/// segments; two bf16 terms add 128 roundings. Rounding errors partly cancel: 1/32 of the model
/// must suffice.
void ExpectInsideModel(Problem& p, bool two_terms, const std::string& what) {
  const std::vector<double> want = reference::Attention(p.input(), p.options);
  const std::vector<double> got = reference::Elements(p.out.view());
  Tensor magnitudes = Absolute(p.v);
  AttentionInput absolute = p.input();
  absolute.values = magnitudes.view();
  const std::vector<double> mixed = reference::Attention(absolute, p.options);
  const std::vector<double> largest = LargestSums(p);
  const TensorView v = p.v.view();
  const auto depth = static_cast<double>(TensorView(p.q.view()).dim(2));
  const auto length = static_cast<double>(v.dim(0));
  const auto width = static_cast<size_t>(v.dim(2));
  for (size_t i = 0; i < want.size(); ++i) {
    const double roundings =
        4 * (depth + 8 + (two_terms ? 128 : 0)) * largest[i / width] +
        2 * (std::min(length, 256.0) + length / 128 + 16 + (two_terms ? 128 : 0));
    const double bound =
        roundings / 32 * 0x1p-24 * mixed[i] + RoundingOf(TensorView(p.out.view()).dtype(), want[i]);
    ASSERT_LE(std::abs(got[i] - want[i]), bound) << what << " at " << i << ", want " << want[i];
  }
}

// 22 shapes x 9 pairs of types; layouts, windows, scales and sinks vary from case to case. The
// simulator takes one pair per shape.
TEST_P(AttentionOnEveryLevel, AttentionIsInsideItsErrorModel) {
  const bool simulated = device().info().backend == "metal";
  unsigned seed = 0;
  for (const AttentionShape& s : kShapes) {
    for (const DType q_type : kTypes) {
      for (const DType kv_type : kTypes) {
        if (++seed % 10 != 0 && simulated) continue;
        Problem p = MakeProblem(s, q_type, kv_type, seed);
        const AttentionInput input = p.input();
        ASSERT_TRUE(Attention(device(), {&input, 1}, p.options).ok());
        const bool tiles = std::string(GetParam()) == "amx" && kv_type == DType::kBf16;
        ExpectInsideModel(p, tiles, "case " + std::to_string(seed));
        if (simulated) continue;  // The same kernels.
        p.options.accuracy = Accuracy::kExact;
        ASSERT_TRUE(Attention(device(), {&input, 1}, p.options).ok());
        ExpectInsideModel(p, false, "exact case " + std::to_string(seed));
      }
    }
  }
}

/// Also of heads of 256 and 512 features, as Gemma has them.
TEST_P(AttentionOnEveryLevel, AttentionCapsScores) {
  constexpr AttentionShape kCapped[] = {{1, 33, 8, 2, 80, 80},
                                        {5, 5, 4, 2, 128, 128},
                                        {33, 64, 2, 1, 40, 24},
                                        {1, 300, 4, 2, 512, 512},
                                        {40, 280, 2, 1, 256, 256}};
  unsigned seed = 0;
  int changed = 0;  // A row that sees one key has the same result with and without a cap.
  for (const AttentionShape& s : kCapped) {
    for (const DType kv_type : kTypes) {
      Problem p = MakeProblem(s, DType::kF32, kv_type, ++seed);
      if (std::string(GetParam()) == "metal_sim" && seed % 4 != 0) continue;
      const AttentionInput input = p.input();
      p.options.softcap = 1.5F;
      const std::vector<double> capped = reference::Attention(input, p.options);
      ASSERT_TRUE(Attention(device(), {&input, 1}, p.options).ok());
      ASSERT_TRUE(device().Synchronize().ok());
      ExpectInsideModel(p, false, std::to_string(s.depth));
      p.options.softcap = 0;
      if (reference::Attention(input, p.options) != capped) ++changed;
    }
  }
  EXPECT_GT(changed, std::string(GetParam()) == "metal_sim" ? 1 : 10);
}

// Includes shapes whose partitioning depends on the number of threads.
TEST_P(AttentionOnEveryLevel, AttentionGivesTheSameBitsOnAnyNumberOfThreads) {
  if (device().info().backend == "metal") GTEST_SKIP() << "has no threads of the host";
  unsigned seed = 0;
  for (const AttentionShape& s : kShapes) {
    ++seed;
    Problem p = MakeProblem(s, DType::kF32, kTypes[seed % 3], seed);
    const AttentionInput input = p.input();
    ASSERT_TRUE(Attention(OpenWith(GetParam(), 1), {&input, 1}, p.options).ok());
    const std::vector<double> want = reference::Elements(p.out.view());
    for (const int threads : {2, 3, 16}) {
      p.out.Fill(9);
      ASSERT_TRUE(Attention(OpenWith(GetParam(), threads), {&input, 1}, p.options).ok());
      EXPECT_EQ(reference::Elements(p.out.view()), want) << "case " << seed;
    }
  }
}

/// Runs the `count` tokens of q from `first` on, with the keys visible to the last of them.
std::vector<double> RunPart(const Device& device, Problem& p, int64_t first, int64_t count) {
  const auto cut = [](const TensorView& view, int64_t begin, int64_t length) {
    const auto* data = view.As<uint8_t>() + begin * view.stride(0) * DTypeBytes(view.dtype());
    return TensorView(data, view.dtype(), {length, view.dim(1), view.dim(2)},
                      {view.stride(0), view.stride(1), 1});
  };
  const TensorView q = p.q.view();
  const TensorView k = p.k.view();
  const int64_t length = k.dim(0) - q.dim(0) + first + count;
  Tensor out(DType::kF32, {count, q.dim(1), TensorView(p.v.view()).dim(2)});
  const AttentionInput input{cut(q, first, count), cut(k, 0, length), cut(p.v.view(), 0, length),
                             out.view()};
  EXPECT_TRUE(Attention(device, {&input, 1}, p.options).ok());
  return reference::Elements(out.view());
}

// With batch invariance, a row depends neither on its neighbours nor on the number of rows, so that
// token-by-token decoding gives the bits of prefill.
TEST_P(AttentionOnEveryLevel, AttentionRowsAreIndependent) {
  // Minutes in the simulator: simulated_attention_test.cc has less of it.
  if (device().info().backend == "metal") GTEST_SKIP() << "simulated elsewhere";
  constexpr AttentionShape kLong[] = {{90, 2300, 8, 2, 64, 64}, {70, 1000, 3, 3, 40, 24}};
  for (const AttentionShape& s : kLong) {
    for (const DType kv_type : kTypes) {
      for (const int64_t window : {0, 300}) {
        Problem p = MakeProblem(s, DType::kF32, kv_type, 5);
        p.options.window = window;
        p.options.chunked = kv_type == DType::kF16;
        p.options.determinism = Determinism::kBatchInvariant;
        const std::vector<double> all = RunPart(device(), p, 0, s.tokens);
        for (const auto& [first, count] : {std::pair{0, 1}, {17, 3}, {30, 33}, {69, 1}}) {
          const auto row = static_cast<std::ptrdiff_t>(s.heads * s.width);
          const std::vector<double> want(all.begin() + first * row,
                                         all.begin() + (first + count) * row);
          EXPECT_EQ(RunPart(device(), p, first, count), want) << first << " " << count;
        }
      }
    }
  }
}

TEST_P(AttentionOnEveryLevel, AttentionOfABatchIsThatOfItsSequences) {
  std::vector<Problem> batch;
  std::vector<std::vector<double>> want;
  for (const AttentionShape& s : {AttentionShape{1, 700, 4, 2, 32, 32},
                                  {1, 3, 4, 2, 32, 32},
                                  {50, 90, 4, 2, 32, 32},
                                  {0, 8, 4, 2, 32, 32}}) {
    batch.push_back(MakeProblem(s, DType::kF32, DType::kBf16, 6));
    const AttentionInput input = batch.back().input();
    ASSERT_TRUE(Attention(device(), {&input, 1}).ok());
    want.push_back(reference::Elements(batch.back().out.view()));
    batch.back().out.Fill(1);
  }
  std::vector<AttentionInput> inputs;
  for (Problem& p : batch) inputs.push_back(p.input());
  ASSERT_TRUE(Attention(device(), inputs).ok());
  for (size_t i = 0; i < batch.size(); ++i) {
    EXPECT_EQ(reference::Elements(batch[i].out.view()), want[i]) << i;
  }
  EXPECT_TRUE(Attention(device(), {}).ok());
}

TEST_P(AttentionOnEveryLevel, AttentionOverwritesItsQueries) {
  for (const int64_t tokens : {1, 40}) {
    Problem p = MakeProblem({tokens, 300, 4, 2, 64, 64}, DType::kF32, DType::kF16, 5);
    const AttentionInput apart = p.input();
    ASSERT_TRUE(Attention(device(), {&apart, 1}, p.options).ok());
    const AttentionInput in_place{p.q.view(), p.k.view(), p.v.view(), p.q.view()};
    const Status status = Attention(device(), {&in_place, 1}, p.options);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(reference::Elements(p.q.view()), reference::Elements(p.out.view()));
  }
}

/// A key or a value of NaN, visible to positions 62 .. 65 with a window of 4.
void ExpectNanReachesThoseWhoSeeIt(const Device& device, DType type, bool in_values) {
  constexpr int64_t kTokens = 12;
  constexpr int64_t kLength = 70;
  constexpr int64_t kBad = 62;
  Problem p = MakeProblem({kTokens, kLength, 2, 1, 32, 32}, DType::kF32, type, 1);
  p.options = {.window = 4};
  Tensor& bad = in_values ? p.v : p.k;
  for (int64_t d = 0; d < 32; ++d) {
    bad.Set(kBad * TensorView(bad.view()).stride(0) + d, std::nanf(""));
  }
  const AttentionInput input = p.input();
  ASSERT_TRUE(Attention(device, {&input, 1}, p.options).ok());
  const std::vector<double> out = reference::Elements(p.out.view());
  for (size_t i = 0; i < out.size(); ++i) {
    const int64_t position = kLength - kTokens + static_cast<int64_t>(i) / 64;
    EXPECT_EQ(std::isnan(out[i]), position >= kBad && position < kBad + 4) << position;
  }
}

// Masked keys must not affect a row, not even as 0 * NaN.
TEST_P(AttentionOnEveryLevel, AttentionKeepsNanToTheRowsThatSeeIt) {
  for (const DType type : kTypes) {
    ExpectNanReachesThoseWhoSeeIt(device(), type, false);
    ExpectNanReachesThoseWhoSeeIt(device(), type, true);
  }
}

// An infinite value is excluded from the tile MMAs and added after them.
TEST_P(AttentionOnEveryLevel, AttentionOfInfiniteValues) {
  Problem p = MakeProblem({20, 300, 4, 2, 64, 48}, DType::kF32, DType::kBf16, 1);
  p.options = {};
  const int64_t stride = TensorView(p.v.view()).stride(0);
  p.v.Set(17 * stride + 5, std::numeric_limits<float>::infinity());
  p.v.Set(290 * stride + 48 + 7, -std::numeric_limits<float>::infinity());
  const AttentionInput input = p.input();
  ASSERT_TRUE(Attention(device(), {&input, 1}, p.options).ok());
  const std::vector<double> want = reference::Attention(input, p.options);
  const std::vector<double> got = reference::Elements(p.out.view());
  for (size_t i = 0; i < want.size(); ++i) {
    const auto position = static_cast<int64_t>(280 + i / (4 * 48));
    const bool hidden = std::isnan(want[i]) && position < 290;  // 0 * Inf in the reference.
    if (std::isfinite(want[i]) || hidden) {
      EXPECT_TRUE(std::isfinite(got[i])) << i;
    } else {
      EXPECT_EQ(got[i], want[i]) << i;
    }
  }
}

// Scores that are far apart, partly -Inf, or all -Inf.
TEST_P(AttentionOnEveryLevel, AttentionOfExtremeScores) {
  Problem p = MakeProblem({1, 600, 1, 1, 16, 16}, DType::kF32, DType::kF32, 1);
  p.options = {.scale = 1.0F};
  const float infinity = std::numeric_limits<float>::infinity();
  const auto fill = [&](const auto& score_of) {
    for (int64_t key = 0; key < 600; ++key) {
      for (int64_t d = 0; d < 16; ++d) {
        p.k.Set(key * TensorView(p.k.view()).stride(0) + d, d == 0 ? score_of(key) : 0.0F);
      }
    }
    const AttentionInput input = p.input();
    ASSERT_TRUE(Attention(device(), {&input, 1}, p.options).ok());
  };
  for (int64_t d = 0; d < 16; ++d) p.q.Set(d, d == 0 ? 1.0F : 0.0F);
  const auto expect_reference = [&] {
    ExpectNear(p.out.view(), reference::Attention(p.input(), p.options), 1e-5, 1e-6, "out");
  };
  fill([&](int64_t key) { return key < 550 ? -infinity : 0.25F; });
  expect_reference();
  fill([&](int64_t key) { return key == 3 ? 3e38F : -3e38F; });
  expect_reference();
  fill([&](int64_t key) { return static_cast<float>(key) - 300.0F; });
  expect_reference();
  fill([&](int64_t) { return -infinity; });
  for (const double x : reference::Elements(p.out.view())) EXPECT_TRUE(std::isnan(x));
  // A sink takes the whole weight.
  p.sinks = {0.0F};
  p.options.sinks = {p.sinks.data(), DType::kF32, {1}};
  fill([&](int64_t) { return -infinity; });
  for (const double x : reference::Elements(p.out.view())) EXPECT_EQ(x, 0.0);
}

TEST(Attention, ErrorsNameTheArgument) {
  const Device device = *Device::Open("cpu");
  Tensor x(DType::kF32, {2, 3, 8});
  Tensor out(DType::kF32, {2, 3, 8});
  const auto message = [&](const TensorView& keys, const TensorView& values,
                           const MutableTensorView& to, const AttentionOptions& options = {}) {
    const AttentionInput input{x.view(), keys, values, to};
    const Status status = Attention(device, {&input, 1}, options);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.message();
  };
  Tensor few(DType::kF32, {1, 3, 8});
  EXPECT_THAT(message(few.view(), few.view(), out.view()),
              HasSubstr("keys: expected at least the 2 tokens of queries, got 1"));
  Tensor uneven(DType::kF32, {2, 2, 8});
  EXPECT_THAT(message(uneven.view(), uneven.view(), out.view()),
              HasSubstr("queries: 3 heads are not a multiple of the 2 of keys"));
  Tensor narrow(DType::kF32, {2, 3, 7});
  EXPECT_THAT(message(narrow.view(), narrow.view(), out.view()),
              HasSubstr("keys: expected [2, 3, 8], got [2, 3, 7]"));
  Tensor keys(DType::kF32, {2, 3, 8});
  EXPECT_THAT(message(keys.view(), narrow.view(), out.view()),
              HasSubstr("out: expected [2, 3, 7], got [2, 3, 8]"));
  EXPECT_THAT(message(keys.view(), keys.view(), keys.view()), HasSubstr("out: overlaps keys"));
  EXPECT_THAT(message(keys.view(), keys.view(), out.view(), {.window = -1}),
              HasSubstr("window: expected 0 or more, got -1"));
  const float sinks[] = {0, 0};
  EXPECT_THAT(message(keys.view(), keys.view(), out.view(), {.sinks = {sinks, DType::kF32, {2}}}),
              HasSubstr("sinks: expected [3], got [2]"));
}

}  // namespace
}  // namespace marlin::attention_test
