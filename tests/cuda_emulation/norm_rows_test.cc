// Norms of many rows on the host: the bits of the decode kernels, and norms of every type.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "backends/cuda/rows/norm_launch.h"
#include "base/scalars.h"
#include "cuda_emulation/emulate.h"
#include "delicate_squares.h"

namespace marlin::cuda {
namespace {

constexpr int kRows = 15;
constexpr int kPadding = 8;

/// Rows of numbers, in a type.
struct Numbers {
  Numbers(Element given, int count)
      : type(given), columns(count), words(static_cast<size_t>(kRows * stride())) {}

  int64_t stride() const { return columns + kPadding; }
  RowsView View() {
    RowsView view;
    view.data = words.data();
    view.type = type;
    view.rows = kRows;
    view.stride = stride();
    return view;
  }
  float At(int row, int column) const {
    const auto at = static_cast<size_t>(row * stride() + column);
    if (type == Element::kF32) return reinterpret_cast<const float*>(words.data())[at];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(words.data())[at];
    return type == Element::kBf16 ? Bf16ToFloat(bits) : HalfToFloat(bits);
  }
  void Set(int row, int column, float value) {
    const auto at = static_cast<size_t>(row * stride() + column);
    if (type == Element::kF32) {
      reinterpret_cast<float*>(words.data())[at] = value;
    } else {
      reinterpret_cast<uint16_t*>(words.data())[at] =
          type == Element::kBf16 ? FloatToBf16(value) : FloatToHalf(value);
    }
  }

  Element type;
  int columns;
  std::vector<uint32_t> words;
};

struct Types {
  Element x = Element::kF32;
  Element block = Element::kF32;
  Element out = Element::kF32;
};

/// A norm of rows whose sums of squares tell their order, except for every third.
class Norm {
 public:
  Norm(int columns, const Types& types)
      : x(types.x, columns), block(types.block, columns), out(types.out, columns) {
    std::mt19937 random(static_cast<unsigned>(columns));
    std::normal_distribution<float> normal;
    std::vector<float> row(static_cast<size_t>(columns));
    for (int r = 0; r < kRows; ++r) {
      cuda_emulation::FillDelicate(row, random);
      for (int i = 0; i < columns; ++i) {
        const float half = 0.5f * row[static_cast<size_t>(i)];
        x.Set(r, i, r % 3 == 2 ? normal(random) : half);
        block.Set(r, i, r % 3 == 2 ? normal(random) : half);
      }
    }
    for (int i = 0; i < columns; ++i) weights_.push_back(normal(random));
  }

  RmsNormArguments Arguments(bool adds, float epsilon = 0.0f) {
    RmsNormArguments args;
    args.x = x.View();
    if (adds) args.block = block.View();
    args.out = out.View();
    args.weight = weights_.data();
    args.columns = x.columns;
    args.epsilon = epsilon;
    return args;
  }
  float weight(int i) const { return weights_[static_cast<size_t>(i)]; }

  Numbers x;
  Numbers block;
  Numbers out;

 private:
  std::vector<float> weights_;
};

TEST(NormRows, HasTheBitsOfFewRows) {
  for (const int columns : {516, 1024, 1028, 1536, 2048, 2880, 3072, 3076, 4096}) {
    for (const bool adds : {false, true}) {
      const Element out_type = columns % 3 == 0   ? Element::kBf16
                               : columns % 5 == 1 ? Element::kF16
                                                  : Element::kF32;
      Norm many(columns, {.out = out_type});
      Norm few(columns, {.out = out_type});
      ASSERT_TRUE(TakesNormRows(many.Arguments(adds)));
      ASSERT_EQ(LaunchNormRows(many.Arguments(adds), nullptr), cudaSuccess);
      ASSERT_EQ(LaunchNorm(few.Arguments(adds), nullptr), cudaSuccess);
      EXPECT_EQ(cuda_emulation::TakeFindings(), "");
      EXPECT_EQ(many.out.words, few.out.words) << columns << " " << adds;
      EXPECT_EQ(many.x.words, few.x.words) << columns << " " << adds;
      EXPECT_EQ(many.x.words == Norm(columns, {}).x.words, !adds);
    }
  }
}

TEST(NormRows, TakesVectorsAlone) {
  Norm norm(2048, {});
  const RmsNormArguments good = norm.Arguments(true);
  ASSERT_TRUE(TakesNormRows(good));
  const auto takes = [&](const auto& change) {
    RmsNormArguments args = good;
    change(args);
    return TakesNormRows(args);
  };
  EXPECT_FALSE(takes([](auto& args) { args.columns = 512; }));
  EXPECT_FALSE(takes([](auto& args) { args.columns = 4100; }));
  EXPECT_FALSE(takes([](auto& args) { args.columns = 2046; }));
  EXPECT_FALSE(takes([](auto& args) { args.x.stride += 2; }));
  EXPECT_FALSE(takes([](auto& args) { args.x.type = Element::kBf16; }));
  EXPECT_FALSE(takes([](auto& args) { args.block.inner = 2; }));
  EXPECT_FALSE(takes([](auto& args) { args.block.type = Element::kF16; }));
  EXPECT_FALSE(takes([](auto& args) { args.out.inner = 2; }));
  EXPECT_FALSE(takes([](auto& args) { args.out.stride += 1; }));
  EXPECT_FALSE(takes([](auto& args) { args.weight_type = Element::kBf16; }));
}

float Rounded(float value, Element type) {
  if (type == Element::kF32) return value;
  return type == Element::kBf16 ? Bf16ToFloat(FloatToBf16(value)) : HalfToFloat(FloatToHalf(value));
}

/// `norm` was `before`.
void ExpectNormOfSum(const Norm& norm, const Norm& before, int r) {
  const int columns = norm.x.columns;
  double squares = 0;
  for (int i = 0; i < columns; ++i) {
    const float sum = Rounded(before.x.At(r, i) + before.block.At(r, i), norm.x.type);
    ASSERT_EQ(norm.x.At(r, i), sum) << columns << " " << r << " " << i;
    squares += static_cast<double>(sum) * sum;
  }
  const double factor = 1 / std::sqrt(squares / columns + 1e-5);
  for (int i = 0; i < columns; ++i) {
    const double want = norm.x.At(r, i) * factor * norm.weight(i);
    const double part = norm.out.type == Element::kF32 ? 1e-6 : 1e-2;
    ASSERT_NEAR(norm.out.At(r, i), want, part * std::abs(want) + 1e-6)
        << columns << " " << r << " " << i;
  }
}

/// Rows of any type, with an addition that is rounded to the residual's.
TEST(RmsNormKernel, AddsAndNorms) {
  using enum Element;
  for (const int columns : {4, 33, 512, 1000, 9000}) {
    for (const Types& types :
         {Types{kF32, kBf16, kF16}, {kBf16, kF32, kF32}, {kF16, kF16, kBf16}}) {
      Norm norm(columns, types);
      const Norm before = norm;
      ASSERT_EQ(LaunchNorm(norm.Arguments(true, 1e-5f), nullptr), cudaSuccess);
      EXPECT_EQ(cuda_emulation::TakeFindings(), "");
      for (int r = 0; r < kRows; ++r) ExpectNormOfSum(norm, before, r);
    }
  }
}

}  // namespace
}  // namespace marlin::cuda
