// HeadProduct against its reference, term by term, on every ISA level of this CPU.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "decoder_fixture.h"
#include "marlin/decoder.h"

namespace marlin::head_product_test {
namespace {

using ::testing::HasSubstr;

using HeadProductOnEveryLevel = OnEveryLevel;
MARLIN_ON_EVERY_LEVEL(HeadProductOnEveryLevel);

struct ProductCase {
  int64_t tokens, heads, in, outputs;
};

constexpr ProductCase kCases[] = {
    {1, 16, 128, 512}, {3, 4, 512, 128}, {70, 2, 128, 72}, {130, 3, 64, 130},
    {1, 1, 1, 1},      {5, 2, 33, 17},   {9, 2, 48, 40},   {16, 3, 32, 8},
    {17, 5, 96, 33},   {0, 2, 32, 8},    {2, 3, 0, 5},     {40, 1, 24, 7},
};

/// The error of a product: eight ULPs of the type of `out`, and so much of the sum of the terms'
/// sizes.
constexpr double kRelative = 0x1p-16;

std::vector<double> Sizes(const TensorView& x, const TensorView& weights) {
  std::vector<double> sums;
  const std::vector<double> a = reference::Elements(x);
  const std::vector<double> b = reference::Elements(weights);
  const int64_t in = x.dim(2);
  for (int64_t t = 0; t < x.dim(0); ++t) {
    for (int64_t h = 0; h < x.dim(1); ++h) {
      for (int64_t o = 0; o < weights.dim(1); ++o) {
        double sum = 0;
        for (int64_t i = 0; i < in; ++i) {
          sum += std::abs(a[static_cast<size_t>((t * x.dim(1) + h) * in + i)] *
                          b[static_cast<size_t>((h * weights.dim(1) + o) * in + i)]);
        }
        sums.push_back(sum);
      }
    }
  }
  return sums;
}

void ExpectProducts(const Device& device, const ProductCase& c, DType x_type, DType weights_type,
                    DType out_type, const HeadProductOptions& options) {
  Tensor x(x_type, {c.tokens, c.heads, c.in}, 8);
  Tensor weights(weights_type, {c.heads, c.outputs, c.in});
  Tensor out(out_type, {c.tokens, c.heads, c.outputs}, 8);
  x.Fill(static_cast<unsigned>(c.in) + 1, 2.0);
  weights.Fill(static_cast<unsigned>(c.outputs) + 7);
  const Status status = HeadProduct(device, x.view(), weights.view(), out.view(), options);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_TRUE(device.Synchronize().ok());
  const std::vector<double> want = reference::HeadProduct(x.view(), weights.view());
  const std::vector<double> got = reference::Elements(out.view());
  const std::vector<double> sizes = Sizes(x.view(), weights.view());
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const double bound = kRelative * sizes[i] + 8 * Unit(out_type) * std::abs(want[i]);
    ASSERT_NEAR(got[i], want[i], bound)
        << fmt::format("{} x {} x {} -> {}, {} {} {} at {}", c.tokens, c.heads, c.in, c.outputs,
                       DTypeName(x_type), DTypeName(weights_type), DTypeName(out_type), i);
  }
}

TEST_P(HeadProductOnEveryLevel, HeadProductIsItsReference) {
  for (const ProductCase& c : kCases) {
    for (const DType weights : kTypes) {
      ExpectProducts(device(), c, DType::kF32, weights, DType::kF32, {});
      ExpectProducts(device(), c, DType::kF32, weights, DType::kBf16, {});
      ExpectProducts(device(), c, DType::kF32, weights, DType::kF32,
                     {Accuracy::kExact, Determinism::kDefault});
    }
    ExpectProducts(device(), c, DType::kBf16, DType::kBf16, DType::kF16, {});
    ExpectProducts(device(), c, DType::kF16, DType::kF32, DType::kF32, {});
  }
}

TEST_P(HeadProductOnEveryLevel, HeadProductRowsDoNotDependOnOthers) {
  for (const ProductCase& c : kCases) {
    if (c.tokens < 2 || c.in == 0) continue;
    Tensor x(DType::kF32, {c.tokens, c.heads, c.in});
    Tensor weights(DType::kBf16, {c.heads, c.outputs, c.in});
    Tensor all(DType::kF32, {c.tokens, c.heads, c.outputs});
    Tensor one(DType::kF32, {1, c.heads, c.outputs});
    x.Fill(3);
    weights.Fill(4);
    const HeadProductOptions options{Accuracy::kDefault, Determinism::kBatchInvariant};
    ASSERT_TRUE(HeadProduct(device(), x.view(), weights.view(), all.view(), options).ok());
    const auto* const last = x.view().As<float>() + (c.tokens - 1) * c.heads * c.in;
    const TensorView row(last, DType::kF32, {1, c.heads, c.in});
    ASSERT_TRUE(HeadProduct(device(), row, weights.view(), one.view(), options).ok());
    ASSERT_TRUE(device().Synchronize().ok());
    const std::vector<double> values = reference::Elements(all.view());
    const std::vector<double> tail(values.end() - c.heads * c.outputs, values.end());
    EXPECT_EQ(reference::Elements(one.view()), tail) << c.in;
  }
}

TEST_P(HeadProductOnEveryLevel, HeadProductWritesItsOutputOnly) {
  // Heads between the columns of others, as the latent part of queries.
  Tensor x(DType::kF32, {20, 4, 96});
  Tensor weights(DType::kBf16, {4, 40, 64});
  Tensor out(DType::kF32, {20, 4, 56});
  x.Fill(1);
  weights.Fill(2);
  const MutableTensorView all = out.view();
  for (int64_t i = 0; i < all.ElementCount(); ++i) all.As<float>()[i] = 7.0F;
  const TensorView part(x.view().data(), DType::kF32, {20, 4, 64}, {4 * 96, 96, 1});
  const MutableTensorView to(all.data(), DType::kF32, {20, 4, 40}, {4 * 56, 56, 1});
  ASSERT_TRUE(HeadProduct(device(), part, weights.view(), to).ok());
  ASSERT_TRUE(device().Synchronize().ok());
  const std::vector<double> want = reference::HeadProduct(part, weights.view());
  for (int64_t row = 0; row < 80; ++row) {
    for (int64_t i = 0; i < 56; ++i) {
      const float got = all.As<float>()[row * 56 + i];
      if (i >= 40) {
        ASSERT_EQ(got, 7.0F) << row << " " << i;
      } else {
        ASSERT_NEAR(got, want[static_cast<size_t>(row * 40 + i)], 1e-3) << row << " " << i;
      }
    }
  }
}

TEST_P(HeadProductOnEveryLevel, HeadProductRefusesOtherShapes) {
  Tensor x(DType::kF32, {2, 4, 32});
  Tensor weights(DType::kBf16, {4, 8, 32});
  Tensor narrow(DType::kBf16, {4, 8, 16});
  Tensor out(DType::kF32, {2, 4, 8});
  Tensor rows(DType::kF32, {2, 32});
  EXPECT_THAT(HeadProduct(device(), x.view(), narrow.view(), out.view()).message(),
              HasSubstr("weights: expected [4, 8, 32], got [4, 8, 16]"));
  EXPECT_THAT(HeadProduct(device(), x.view(), weights.view(), x.view()).message(),
              HasSubstr("out: expected [2, 4, 8]"));
  EXPECT_THAT(HeadProduct(device(), rows.view(), weights.view(), out.view()).message(),
              HasSubstr("x: expected rank 3, got 2"));
  const MutableTensorView inside(x.view().data(), DType::kF32, {2, 4, 8});
  EXPECT_THAT(HeadProduct(device(), x.view(), weights.view(), inside).message(), HasSubstr("out"));
}

}  // namespace
}  // namespace marlin::head_product_test
