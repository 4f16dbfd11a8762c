// Latent attention of MLA: kv_b absorbed into queries and results, over a cache of latents, is
// attention with the keys and values of every head that kv_b expands the latents to.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "../ops/decoder_fixture.h"
#include "base/checked.h"
#include "engine/mixers/latent_attention/absorb.h"
#include "marlin/decoder.h"
#include "marlin/quantize.h"
#include "reference/dequantize.h"

namespace marlin::latent_attention_test {
namespace {

MARLIN_ON_EVERY_LEVEL(OnEveryLevel);

struct LatentCase {
  int64_t heads, nope, rope, value, rank;
  Format format;
  DType cache;
  DType absorbed;
  double tolerance;  ///< Error of results of about 1.
};

constexpr LatentCase kCases[] = {
    {4, 24, 16, 20, 32, Format::kFp32, DType::kF32, DType::kF32, 2e-5},
    {4, 24, 16, 20, 32, Format::kU4, DType::kF32, DType::kF32, 2e-5},
    {3, 32, 8, 40, 64, Format::kFp4E2M1, DType::kF32, DType::kF32, 2e-5},
    {16, 64, 32, 64, 128, Format::kFp4E2M1, DType::kBf16, DType::kBf16, 2e-2},
    {20, 128, 64, 128, 512, Format::kU4, DType::kBf16, DType::kBf16, 2e-2},
};

constexpr int64_t kTokens = 70;

/// The results of the layers in front of attention, and the expanded form in double.
class LatentProblem {
 public:
  explicit LatentProblem(const LatentCase& c)
      : case_(c),
        queries_(DType::kF32, {kTokens, c.heads, c.nope + c.rope}),
        latent_(DType::kF32, {kTokens, 1, c.rank + c.rope}),
        dense_(DType::kF32, {c.heads * (c.nope + c.value), c.rank}) {
    queries_.Fill(1);
    latent_.Fill(2);
    dense_.Fill(3, 1.0 / std::sqrt(static_cast<double>(c.rank)));
  }

  Result<QuantizedWeights> Quantized() {
    return Quantize(TensorView(dense_.view()).Transposed(),
                    {.format = case_.format, .group_size = 32});
  }
  Tensor& queries() { return queries_; }
  Tensor& latent() { return latent_; }

  std::vector<double> Expanded(const QuantizedWeights& weights, double scale) {
    const LatentCase& c = case_;
    const reference::DenseWeights w = *reference::Dequantize(weights);
    Tensor keys(DType::kF32, {kTokens, c.heads, c.nope + c.rope});
    Tensor values(DType::kF32, {kTokens, c.heads, c.value});
    const auto* const latent = latent_.view().As<float>();
    for (int64_t token = 0; token < kTokens; ++token) {
      const float* const row = latent + token * (c.rank + c.rope);
      for (int64_t head = 0; head < c.heads; ++head) {
        const auto expand = [&](int64_t of_head) {
          double sum = 0;
          for (int64_t i = 0; i < c.rank; ++i) {
            const int64_t n = head * (c.nope + c.value) + of_head;
            sum += double{row[i]} * w.value[static_cast<size_t>(i * w.n + n)];
          }
          return static_cast<float>(sum);
        };
        const int64_t key = (token * c.heads + head) * (c.nope + c.rope);
        for (int64_t i = 0; i < c.nope; ++i) keys.Set(key + i, expand(i));
        for (int64_t i = 0; i < c.rope; ++i) keys.Set(key + c.nope + i, row[c.rank + i]);
        for (int64_t i = 0; i < c.value; ++i) {
          values.Set((token * c.heads + head) * c.value + i, expand(c.nope + i));
        }
      }
    }
    Tensor out(DType::kF32, {kTokens, c.heads, c.value});
    AttentionOptions options;
    options.scale = static_cast<float>(scale);
    return reference::Attention({queries_.view(), keys.view(), values.view(), out.view()}, options);
  }

 private:
  LatentCase case_;
  Tensor queries_;
  Tensor latent_;
  Tensor dense_;
};

MutableTensorView Part(Tensor& of, int64_t first, int64_t width) {
  const MutableTensorView all = of.view();
  return {all.As<float>() + first,
          DType::kF32,
          {all.dim(0), all.dim(1), width},
          {all.stride(0), all.stride(1), 1}};
}

/// The step of a model, over a cache of one page.
void ExpectExpanded(const Device& device, const LatentCase& c) {
  LatentProblem problem(c);
  const Result<QuantizedWeights> weights = problem.Quantized();
  ASSERT_TRUE(weights.ok()) << weights.status().message();
  Result<PreparedWeights> prepared = Prepare(*weights, device);
  ASSERT_TRUE(prepared.ok()) << prepared.status().message();
  Projection kv_b;
  kv_b.in = c.rank;
  kv_b.out = c.heads * (c.nope + c.value);
  kv_b.parts.push_back(*std::move(prepared));
  Dimensions shape;
  shape.heads = c.heads;
  shape.nope_dim = c.nope;
  shape.rope_dim = c.rope;
  shape.v_dim = c.value;
  shape.kv_rank = c.rank;
  const Result<AbsorbedProjection> absorbed = Absorb(device, kv_b, shape, c.absorbed);
  ASSERT_TRUE(absorbed.ok()) << absorbed.status().message();
  EXPECT_EQ(absorbed->bytes(), AbsorbedBytes(shape, c.absorbed));

  const int64_t page_tokens = RoundUp(kTokens, *CachePageTokens(device));
  const int64_t wide = c.rank + c.rope;
  std::vector<int32_t> positions(kTokens);
  std::iota(positions.begin(), positions.end(), 0);
  const std::vector<int32_t> first_rows = {0, kTokens};
  const std::vector<int32_t> table = {0};
  const SequenceRows rows{{positions.data(), DType::kI32, {kTokens}},
                          {first_rows.data(), DType::kI32, {2}},
                          {table.data(), DType::kI32, {1, 1}}};
  std::vector<uint8_t> memory(static_cast<size_t>(page_tokens * wide * 4) + 64);
  void* const slab = memory.data();
  const PagedCache cache{{&slab, 1}, 1,   page_tokens * wide, 0, c.cache, page_tokens, 1, wide,
                         c.rank,     true};
  Tensor queries(DType::kF32, {kTokens, c.heads, wide});
  Tensor mixed(DType::kF32, {kTokens, c.heads, c.rank});
  Tensor out(DType::kF32, {kTokens, c.heads, c.value});
  HeadProductOptions products;
  AttentionOptions options;
  options.scale = 1.0F / std::sqrt(static_cast<float>(c.nope + c.rope));
  if (c.absorbed == DType::kF32) products.accuracy = options.accuracy = Accuracy::kExact;
  ASSERT_TRUE(AppendToCache(device, problem.latent().view(), {}, rows, cache).ok());
  ASSERT_TRUE(
      Convert(device, Part(problem.queries(), c.nope, c.rope), Part(queries, c.rank, c.rope)).ok());
  ASSERT_TRUE(HeadProduct(device, Part(problem.queries(), 0, c.nope), absorbed->key_matrices,
                          Part(queries, 0, c.rank), products)
                  .ok());
  ASSERT_TRUE(PagedAttention(device, queries.view(), rows, cache, mixed.view(), options).ok());
  ASSERT_TRUE(
      HeadProduct(device, mixed.view(), absorbed->value_matrices, out.view(), products).ok());
  ASSERT_TRUE(device.Synchronize().ok());
  ExpectNear(out.view(), problem.Expanded(*weights, double{options.scale}), 0, c.tolerance,
             fmt::format("{} heads of {}", c.heads, c.rank));
}

TEST_P(OnEveryLevel, LatentsGiveWhatExpandedHeadsGive) {
  for (const LatentCase& c : kCases) ExpectExpanded(device(), c);
}

}  // namespace
}  // namespace marlin::latent_attention_test
