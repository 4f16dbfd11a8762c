// The products per head of MLA in the simulator: against the reference, and what they read.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include "simulated_attention.h"

namespace marlin::metal::simulated_head_product_test {
namespace {

using ::testing::ElementsAre;

using SimulatedHeadProduct = SimulatedDecoderTest;

Numbers Random(DType type, int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, 1.0F);
  Numbers numbers(type, count);
  for (int64_t i = 0; i < count; ++i) numbers.Set(i, normal(random));
  return numbers;
}

TEST_F(SimulatedHeadProduct, GivesTheReferenceAndReadsWeightsOncePerTile) {
  struct Sizes {
    int64_t tokens, heads, in, outputs;
    DType x, weights;
  };
  for (const Sizes& c : {Sizes{1, 3, 128, 72, DType::kF32, DType::kBf16},
                         {9, 2, 40, 65, DType::kBf16, DType::kF16},
                         {35, 1, 33, 7, DType::kF16, DType::kF32}}) {
    Numbers x = Random(c.x, c.tokens * c.heads * c.in, 1);
    Numbers weights = Random(c.weights, c.heads * c.outputs * c.in, 2);
    Numbers out(DType::kF32, c.tokens * c.heads * c.outputs);
    const TensorView rows(x.data(), c.x, {c.tokens, c.heads, c.in});
    const TensorView matrices(weights.data(), c.weights, {c.heads, c.outputs, c.in});
    const MutableTensorView to(out.data(), DType::kF32, {c.tokens, c.heads, c.outputs});
    const HeadProductOptions options;
    const Status status = decoder_.Run(HeadProductCall{rows, matrices, to, options});
    ASSERT_TRUE(status.ok()) << status.message();
    ExpectClose(reference::Elements(to), reference::HeadProduct(rows, matrices), 1e-5,
                fmt::format("{} tokens", c.tokens));
    const int64_t tiles = c.tokens <= 8 ? 1 : CeilDivide(c.tokens, int64_t{32});
    const metal_sim::Counters& counters = decoder_.launches().front().counters;
    EXPECT_EQ(counters.buffers[1].bytes_read, tiles * matrices.ByteCount());
    EXPECT_EQ(counters.threadgroup_bytes, 0);
    EXPECT_EQ(counters.threadgroup_barriers, 0);
  }
}

/// Latents of three pages, and what two of them expand to.
class Expansion {
 public:
  Status Run(SimulatedDecoder& decoder) {
    return decoder.Run(ExpandLatentsCall{
        {{&latent_slab_, 1}, 3, kPage * kWide, 0, DType::kBf16, kPage, 1, kWide, kLatent, true},
        {pages.data(), DType::kI32, {2}},
        {tokens.data(), DType::kI32, {2}},
        {key_weights_.data(), DType::kF32, {kHeads, kLatent, kNope}},
        {value_weights_.data(), DType::kBf16, {kHeads, kValue, kLatent}},
        {{&head_slab_, 1}, 2, kHeadPage, 0, DType::kF32, kPage, kHeads, kNope + kRope, kValue}});
  }

  /// Compares a token of a page with its latent.
  void Expect(int64_t page, int64_t token) const {
    const int64_t latent = (pages[static_cast<size_t>(page)] * kPage + token) * kWide;
    for (int64_t head = 0; head < kHeads; ++head) {
      for (int64_t i = 0; i < kNope; ++i) {
        double sum = 0;
        for (int64_t j = 0; j < kLatent; ++j) {
          sum += double{cached_.Get(latent + j)} *
                 double{key_weights_.Get((head * kLatent + j) * kNope + i)};
        }
        ASSERT_NEAR(Key(page, head, token, i), sum, 1e-5) << page << " " << token << " " << i;
      }
      for (int64_t i = 0; i < kRope; ++i) {
        ASSERT_EQ(Key(page, head, token, kNope + i), cached_.Get(latent + kLatent + i));
      }
      for (int64_t i = 0; i < kValue; ++i) {
        double sum = 0;
        for (int64_t j = 0; j < kLatent; ++j) {
          sum += double{cached_.Get(latent + j)} *
                 double{value_weights_.Get((head * kValue + i) * kLatent + j)};
        }
        const int64_t at = kHeads * kPage * (kNope + kRope) + (head * kPage + token) * kValue + i;
        ASSERT_NEAR(heads_.Get(page * kHeadPage + at), sum, 1e-5) << token << " " << i;
      }
    }
  }
  float Key(int64_t page, int64_t head, int64_t token, int64_t i) const {
    return heads_.Get(page * kHeadPage + (head * kPage + token) * (kNope + kRope) + i);
  }

  std::vector<int32_t> pages = {2, 0};
  std::vector<int32_t> tokens = {40, 64};

 private:
  static constexpr int64_t kHeads = 2;
  static constexpr int64_t kLatent = 24;
  static constexpr int64_t kRope = 5;
  static constexpr int64_t kWide = kLatent + kRope;
  static constexpr int64_t kNope = 9;
  static constexpr int64_t kValue = 11;
  static constexpr int64_t kPage = 64;
  static constexpr int64_t kHeadPage = kHeads * kPage * (kNope + kRope + kValue);

  Numbers cached_ = Random(DType::kBf16, 3 * kPage * kWide, 3);
  Numbers key_weights_ = Random(DType::kF32, kHeads* kLatent* kNope, 4);
  Numbers value_weights_ = Random(DType::kBf16, kHeads* kValue* kLatent, 5);
  Numbers heads_{DType::kF32, 2 * kHeadPage};
  void* const latent_slab_ = cached_.data();
  void* const head_slab_ = heads_.data();
};

TEST_F(SimulatedHeadProduct, ExpandsLatents) {
  Expansion expansion;
  const Status status = expansion.Run(decoder_);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_THAT(decoder_.Functions(), ElementsAre("latent_expand"));
  for (int64_t page = 0; page < 2; ++page) {
    for (int64_t token = 0; token < expansion.tokens[static_cast<size_t>(page)]; ++token) {
      ASSERT_NO_FATAL_FAILURE(expansion.Expect(page, token));
    }
  }
  EXPECT_TRUE(std::isnan(expansion.Key(0, 0, 40, 0))) << "a token that is not wanted";
}

TEST_F(SimulatedHeadProduct, WrongLatentsAreErrors) {
  Expansion expansion;
  expansion.pages[1] = 3;
  EXPECT_EQ(expansion.Run(decoder_).message(), "pages: no page 3 at 1");
  expansion.tokens[0] = 65;
  EXPECT_EQ(expansion.Run(decoder_).message(), "tokens: expected 0 to 64, got 65 at 0");
  expansion.pages[0] = -1;
  EXPECT_EQ(expansion.Run(decoder_).message(), "pages: no page -1 at 0");
}

}  // namespace
}  // namespace marlin::metal::simulated_head_product_test
