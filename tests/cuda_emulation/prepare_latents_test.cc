// Preparation of rows for latent attention: the same bits as RoPE and append one after the other,
// also in one launch with a product.
#include "backends/cuda/attention/latent/prepare_latents.cu"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "backends/cuda/attention/latent/head_product.cuh"
#include "base/scalars.h"
#include "cuda_emulation/emulate.h"

namespace marlin::cuda::prepare_latents_test {
namespace {

constexpr int kHeads = 5;
constexpr int kNope = 64;
constexpr int kRope = 20;  ///< The first 16 rotate.
constexpr int kPairs = 8;
constexpr int kRank = 100;
constexpr int kWide = kRank + kRope;
constexpr int kQuery = kNope + kRope;
constexpr int kBlocks = 3;
constexpr int kLayers = 2;  ///< In a page.
constexpr int kPageElements = kCachePageTokens * kWide;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct LatentsCase {
  Element type = Element::kBf16;
  bool interleaved = false;
  bool multiplies = false;  ///< Together with the product of the queries' other features.
};

class Latents {
 public:
  explicit Latents(const LatentsCase& of) : of_(of) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (std::vector<float>* const values : {&queries_, &latents_}) {
      for (float& value : *values) value = normal(random);
    }
    for (uint16_t& weight : weights_) weight = FloatToBf16(normal(random));
    for (int i = 0; i < kPairs; ++i) frequencies_.push_back(1.0F / static_cast<float>(1 + 3 * i));
    args_.queries = View(queries_.data() + kNope, kHeads, kHeads * kQuery, kQuery);
    args_.wide = View(wide_.data() + kRank, kHeads, kHeads * kWide, kWide);
    args_.latents = View(latents_.data(), 1, kWide, kWide);
    args_.heads = kHeads;
    args_.rope = kRope;
    args_.rotary = {frequencies_.data(), kPairs, 1.25F, of_.interleaved};
    args_.sequences = {positions_.data(), first_rows_.data(), tables_.data(), kRows, 2, kBlocks};
    PagesView& pages = args_.pages;
    pages.slabs[0] = cache_.data();
    pages.slab_count = 1;
    pages.slab_pages = 6;
    pages.page_stride = kLayers * kPageElements;
    pages.first_element = kPageElements;
    pages.type = of_.type;
    pages.page_tokens = kCachePageTokens;
    pages.key_dim = kWide;
    pages.value_dim = kRank;
    pages.values_in_keys = true;
    args_.errors = {&record_, &any_};
  }

  void ExpectPrepared() {
    Launch();
    EXPECT_EQ(any_, 0);
    if (of_.multiplies) ExpectProduct();
    for (int row = 0; row < kRows; ++row) {
      for (int head = 0; head < kHeads; ++head) ExpectQuery(row, head);
      ExpectLatent(row);
    }
    EXPECT_EQ(written_, CountWritten()) << "other elements of the cache";
  }
  /// A position without a page, and one before the text.
  void ExpectErrors() {
    tables_[2] = -1;
    Launch();
    EXPECT_EQ(any_, 1);
    any_ = 0;
    record_ = {};
    positions_[2] = -1;
    Launch();
    EXPECT_EQ(any_, 1);
  }

 private:
  static constexpr int kRows = 3;

  static RowsView View(float* data, int inner, int64_t stride, int64_t inner_stride) {
    return {data, Element::kF32, int64_t{kRows} * inner, inner, stride, inner_stride};
  }
  /// The product of queries and weights, into rows of kWide.
  HeadProductArguments ProductInto(float* out) {
    HeadProductArguments product;
    product.x = View(queries_.data(), kHeads, kHeads * kQuery, kQuery);
    product.weights = {weights_.data(), Element::kBf16, kHeads * kRank,
                       kRank,           kRank * kNope,  kNope};
    product.out = View(out, kHeads, kHeads * kWide, kWide);
    product.tokens = kRows;
    product.heads = kHeads;
    product.inputs = kNope;
    product.outputs = kRank;
    return product;
  }
  void Launch() {
    if (of_.multiplies) {
      PreparedProductArguments args = {ProductInto(wide_.data()), args_};
      args.product_blocks =
          static_cast<int>(HeadProductGrid(args.product, kDecodeRows, kDecodeTiles * 8).x);
      const auto blocks = static_cast<unsigned>(args.product_blocks + PrepareBlocks(args_));
      ASSERT_EQ(cuda_emulation::Emulate(&PreparedProductKernel, {dim3(blocks), kHeadProductThreads},
                                        args),
                "");
      return;
    }
    ASSERT_EQ(LaunchPrepareLatents(args_, nullptr), cudaSuccess);
    ASSERT_EQ(cuda_emulation::TakeFindings(), "");
  }
  void ExpectProduct() {
    std::vector<float> wanted(wide_.size(), kNaN);
    const HeadProductArguments product = ProductInto(wanted.data());
    const dim3 grid = HeadProductGrid(product, kDecodeRows, kDecodeTiles * 8);
    ASSERT_EQ(
        cuda_emulation::Emulate(&DecodeHeadProductKernel, {grid, kHeadProductThreads}, product),
        "");
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (i % kWide < kRank) {
        ASSERT_EQ(wide_[i], wanted[i]) << i;
      }
    }
  }
  std::vector<float> Rotated(const float* from, int position) const {
    std::vector<float> to(from, from + kRope);
    for (int pair = 0; pair < kPairs; ++pair) {
      const int one = of_.interleaved ? 2 * pair : pair;
      const int other = of_.interleaved ? one + 1 : pair + kPairs;
      float cosine;
      float sine;
      RotationOf(frequencies_[static_cast<size_t>(pair)], position, 1.25F, &cosine, &sine);
      to[static_cast<size_t>(one)] = from[one] * cosine - from[other] * sine;
      to[static_cast<size_t>(other)] = from[other] * cosine + from[one] * sine;
    }
    return to;
  }
  void ExpectQuery(int row, int head) const {
    const int position = positions_[static_cast<size_t>(row)];
    const std::vector<float> wanted =
        Rotated(queries_.data() + (row * kHeads + head) * kQuery + kNope, position);
    const float* const found = wide_.data() + (row * kHeads + head) * kWide;
    EXPECT_EQ(std::isnan(found[kRank - 1]), !of_.multiplies) << "the place of a product";
    for (int i = 0; i < kRope; ++i) {
      EXPECT_EQ(found[kRank + i], wanted[static_cast<size_t>(i)]) << row << " " << head << " " << i;
    }
  }
  void ExpectLatent(int row) {
    const int position = positions_[static_cast<size_t>(row)];
    const int sequence = row == 0 ? 0 : 1;
    const int page = tables_[static_cast<size_t>(sequence * kBlocks + position / kCachePageTokens)];
    const int64_t first = int64_t{page} * kLayers * kPageElements + kPageElements +
                          position % kCachePageTokens * kWide;
    const float* const latent = latents_.data() + row * kWide;
    std::vector<float> wanted(latent, latent + kRank);
    const std::vector<float> rotated = Rotated(latent + kRank, position);
    wanted.insert(wanted.end(), rotated.begin(), rotated.end());
    for (int i = 0; i < kWide; ++i) ExpectElement(first + i, wanted[static_cast<size_t>(i)]);
    written_ += kWide;
  }
  void ExpectElement(int64_t at, float wanted) const {
    const auto i = static_cast<size_t>(at);
    if (of_.type == Element::kF32) {
      EXPECT_EQ(reinterpret_cast<const float*>(cache_.data())[i], wanted);
    } else if (of_.type == Element::kBf16) {
      EXPECT_EQ(reinterpret_cast<const uint16_t*>(cache_.data())[i], FloatToBf16(wanted));
    } else {
      EXPECT_EQ(cache_[i], FloatToFp8E4M3(wanted));
    }
  }
  /// Elements of the cache that are not as they were.
  int CountWritten() const {
    const size_t bytes = of_.type == Element::kF32 ? 4 : of_.type == Element::kBf16 ? 2 : 1;
    int count = 0;
    for (size_t i = 0; i + bytes <= cache_.size(); i += bytes) {
      bool untouched = true;
      for (size_t b = 0; b < bytes; ++b) untouched = untouched && cache_[i + b] == kBefore;
      count += untouched ? 0 : 1;
    }
    return count;
  }

  /// No byte of a number that the tests store.
  static constexpr uint8_t kBefore = 0x7f;

  const LatentsCase of_;
  std::vector<float> queries_ = std::vector<float>(kRows * kHeads * kQuery);
  std::vector<float> latents_ = std::vector<float>(kRows * kWide);
  std::vector<float> wide_ = std::vector<float>(kRows * kHeads * kWide, kNaN);
  std::vector<uint16_t> weights_ = std::vector<uint16_t>(kHeads * kRank * kNope);
  std::vector<float> frequencies_;
  std::vector<uint8_t> cache_ = std::vector<uint8_t>(6 * kLayers * kPageElements * 4, kBefore);
  /// A text with one row, and one with two, in different blocks.
  std::vector<int32_t> positions_ = {130, 63, 64};
  std::vector<int32_t> first_rows_ = {0, 1, 3};
  std::vector<int32_t> tables_ = {4, 0, 5, 1, 3, 2};
  PrepareLatentsArguments args_;
  ValueRecord record_;
  int any_ = 0;
  int written_ = 0;
};

TEST(PrepareLatents, HasTheBitsOfRopeAndAppend) {
  for (const bool interleaved : {false, true}) {
    for (const Element type : {Element::kBf16, Element::kE4M3, Element::kF32}) {
      for (const bool multiplies : {false, true}) {
        Latents({type, interleaved, multiplies}).ExpectPrepared();
      }
    }
  }
}

TEST(PrepareLatents, RecordsPositionsWithoutAPage) { Latents({}).ExpectErrors(); }

}  // namespace
}  // namespace marlin::cuda::prepare_latents_test
