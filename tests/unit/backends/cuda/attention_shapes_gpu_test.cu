// The attention kernels of every card on this one: those for less shared memory and without wgmma
// against exact attention, which ops.paged_attention compares with the CPU's.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "backends/cuda/attention/attention_launch.h"
#include "backends/cuda/attention/attention_plan.h"
#include "base/scalars.h"
#include "cards.h"
#include "gpu_fixture.h"

namespace marlin::cuda::attention_shapes_gpu_test {
namespace {

constexpr int kPageTokens = 2 * kCachePageTokens;

struct AttentionCase {
  int key_dim = 128;
  int value_dim = 128;
  bool fp8 = false;
  Element queries = Element::kF32;
  float softcap = 0;
  int window = 0;
  bool chunked = false;
  bool sinks = false;
  bool latent = false;  ///< Values in the keys.
  int kv_heads = 2;
  int group = 3;

  std::string Name(const char* card) const {
    return std::string(card) + " " + std::to_string(key_dim) + " " + std::to_string(value_dim) +
           (fp8 ? " e4m3" : " bf16") + " window " + std::to_string(window) + " queries " +
           std::to_string(static_cast<int>(queries)) + (latent ? " latent" : "");
  }
};

/// Tokens of a sequence, and how many are cached before them.
struct Feed {
  int tokens;
  int before;
};

enum class Kernels : uint8_t { kExact, kDecode, kMma, kLatent };

class AttentionShapesOnGpu : public GpuTest<::testing::Test> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    for (const auto load :
         {LoadAttention, LoadDecodeAttention, LoadMmaAttention, LoadLatentAttention}) {
      ASSERT_EQ(load(), cudaSuccess);
    }
    ASSERT_EQ(
        cudaDeviceGetAttribute(&own_.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0),
        cudaSuccess);
  }

  /// Random operands of a case in device memory.
  void Fill(const AttentionCase& of, const std::vector<Feed>& feeds) {
    args_ = {};
    const int features = of.key_dim + (of.latent ? 0 : of.value_dim);
    std::vector<int32_t> first_rows = {0};
    std::vector<int32_t> positions;
    int blocks = 1;
    for (const Feed& feed : feeds) {
      for (int i = 0; i < feed.tokens; ++i) positions.push_back(feed.before + i);
      first_rows.push_back(static_cast<int32_t>(positions.size()));
      blocks = std::max(blocks, (feed.before + feed.tokens + kPageTokens - 1) / kPageTokens);
    }
    const auto rows = static_cast<int>(positions.size());
    const auto count = static_cast<int>(feeds.size());
    std::vector<int32_t> tables(static_cast<size_t>(count * blocks));
    std::iota(tables.begin(), tables.end(), 0);
    std::shuffle(tables.begin(), tables.end(), std::mt19937(7));
    const int64_t page = int64_t{of.kv_heads} * kPageTokens * features;
    const int heads = of.kv_heads * of.group;
    UploadNumbers(of, page * count * blocks, int64_t{rows} * heads * of.key_dim);
    positions_ = Upload(positions);
    first_rows_ = Upload(first_rows);
    tables_ = Upload(tables);
    sinks_ = Upload(GaussianFloats(heads, 3));
    out_ = Make(int64_t{rows} * heads * of.value_dim * 4);
    const auto view = [&](const DeviceBuffer& buffer, Element type, int width) {
      return RowsView{buffer.data(),          type, int64_t{rows} * heads, heads,
                      int64_t{heads} * width, width};
    };
    args_.queries = view(queries_, of.queries, of.key_dim);
    args_.out = view(out_, Element::kF32, of.value_dim);
    args_.sequences = {static_cast<const int32_t*>(positions_.data()),
                       static_cast<const int32_t*>(first_rows_.data()),
                       static_cast<const int32_t*>(tables_.data()),
                       rows,
                       count,
                       blocks};
    args_.pages.slabs[0] = cache_.data();
    args_.pages.slab_count = 1;
    args_.pages.slab_pages = static_cast<uint32_t>(count * blocks);
    args_.pages.page_stride = page;
    args_.pages.type = of.fp8 ? Element::kE4M3 : Element::kBf16;
    args_.pages.page_tokens = kPageTokens;
    args_.pages.kv_heads = args_.kv_heads = of.kv_heads;
    args_.pages.key_dim = args_.key_dim = of.key_dim;
    args_.pages.value_dim = args_.value_dim = of.value_dim;
    args_.pages.values_in_keys = of.latent;
    args_.group = of.group;
    args_.scale = 1.0F / std::sqrt(static_cast<float>(of.key_dim));
    args_.softcap = of.softcap;
    args_.window = of.window;
    args_.chunked = of.chunked;
    if (of.sinks) args_.sinks = static_cast<const float*>(sinks_.data());
    record_ = Upload(std::vector<ValueRecord>(1));
    any_ = Upload(std::vector<int>(1));
    args_.errors = {static_cast<ValueRecord*>(record_.data()), static_cast<int*>(any_.data())};
    shape_ = {rows,       count,        of.kv_heads,
              of.group,   of.value_dim, blocks * kPageTokens,
              of.key_dim, of.fp8,       of.queries == Element::kBf16};
  }

  /// Random keys and values, and queries.
  void UploadNumbers(const AttentionCase& of, int64_t cached, int64_t queries) {
    const std::vector<float> numbers = GaussianFloats(cached, 1);
    if (of.fp8) {
      std::vector<uint8_t> codes;
      // Codes of numbers from 1/4 to 2, of either sign.
      for (const float number : numbers) {
        const auto bits = static_cast<uint32_t>(std::abs(number) * 4096.0F);
        codes.push_back(static_cast<uint8_t>((number < 0 ? 0x80U : 0U) | (0x28U + bits % 24)));
      }
      cache_ = Upload(codes);
    } else {
      cache_ = Upload(Rounded(numbers));
    }
    const std::vector<float> of_queries = GaussianFloats(queries, 2);
    queries_ = of.queries == Element::kF32 ? Upload(of_queries) : Upload(Rounded(of_queries));
  }
  static std::vector<uint16_t> Rounded(const std::vector<float>& numbers) {
    std::vector<uint16_t> rounded;
    for (const float number : numbers) rounded.push_back(FloatToBf16(number));
    return rounded;
  }

  AttentionPlan PlanOf(Kernels kernels, const DeviceShape& device) const {
    if (kernels == Kernels::kExact) return PlanAttention(shape_, device);
    if (kernels == Kernels::kLatent) return PlanLatentAttention(shape_, device);
    AttentionShape shape = shape_;
    if (kernels == Kernels::kMma) {
      // As if there were enough tokens to occupy the device.
      shape.rows = std::max<int64_t>(shape.rows, 1 << 20);
    }
    AttentionPlan plan = PlanMatrixAttention(shape, device);
    if (kernels == Kernels::kMma) {
      EXPECT_EQ(plan.segments, 0);
      plan.tiles = shape_.rows * shape_.group / plan.tile_rows + shape_.sequences;
    }
    return plan;
  }

  /// The results of kernels as a device takes them.
  std::vector<float> Run(Kernels kernels, const DeviceShape& device) {
    const AttentionPlan plan = PlanOf(kernels, device);
    AttentionArguments args = args_;
    args.tile_rows = plan.tile_rows;
    args.tiles = static_cast<int>(plan.tiles);
    args.segments = static_cast<int>(plan.segments);
    const DeviceBuffer partials = Make(std::max<int64_t>(plan.partial_bytes, 1));
    args.partials = static_cast<float*>(partials.data());
    EXPECT_EQ(cudaMemset(out_.data(), 0xff, static_cast<size_t>(out_.bytes())), cudaSuccess);
    const auto launch = kernels == Kernels::kExact    ? LaunchAttention
                        : kernels == Kernels::kDecode ? LaunchDecodeAttention
                        : kernels == Kernels::kMma    ? LaunchMmaAttention
                                                      : LaunchLatentAttention;
    EXPECT_EQ(launch(args, device, nullptr), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(Download<ValueRecord>(record_)[0].value_error, 0);
    return Download<float>(out_);
  }

  void ExpectNear(const std::vector<float>& actual, const std::vector<float>& expected) const {
    ASSERT_EQ(actual.size(), expected.size());
    // Terms of bf16 leave 2^-16 of a score.
    constexpr float kBound = 5e-4F;
    for (size_t i = 0; i < actual.size(); ++i) {
      ASSERT_NEAR(actual[i], expected[i], kBound) << i;
    }
  }

  /// Compares kernels with the exact ones, and with themselves.
  void Compare(Kernels kernels, const AttentionCase& of, const std::vector<Feed>& feeds) {
    Fill(of, feeds);
    const std::vector<float> expected = Run(Kernels::kExact, own_);
    for (const Card& card : Cards()) {
      if (card.shape.shared_bytes > own_.shared_bytes) continue;
      SCOPED_TRACE(of.Name(card.name));
      DeviceShape device = card.shape;
      device.has_wgmma = false;
      const std::vector<float> actual = Run(kernels, device);
      ExpectNear(actual, expected);
      EXPECT_EQ(Run(kernels, device), actual) << "not deterministic";
      if (HasFatalFailure()) return;
    }
  }

  /// The element of a value of the first sequence and KV head.
  int64_t ValueElement(int key, int feature) const {
    const int page = Download<int32_t>(tables_)[static_cast<size_t>(key / kPageTokens)];
    const int64_t keys = int64_t{args_.kv_heads} * kPageTokens * args_.key_dim;
    return page * args_.pages.page_stride + keys + int64_t{key % kPageTokens} * args_.value_dim +
           feature;
  }

  DeviceShape own_;
  DeviceBuffer cache_;

 private:
  AttentionArguments args_;
  AttentionShape shape_;
  DeviceBuffer queries_, positions_, first_rows_, tables_, sinks_, out_, record_, any_;
};

const std::vector<Feed> kPrompts = {{150, 0}, {1, 40}, {70, 190}, {0, 0}, {3, 5}};

TEST_F(AttentionShapesOnGpu, PrefillOnMma) {
  for (const auto& [key_dim, value_dim] : {std::pair{64, 64},
                                           {128, 128},
                                           {192, 128},
                                           {256, 256},
                                           {80, 48},
                                           {256, 64},
                                           {96, 112},
                                           {16, 240}}) {
    for (const bool fp8 : {false, true}) {
      for (const Element queries : {Element::kF32, Element::kBf16}) {
        Compare(Kernels::kMma, {key_dim, value_dim, fp8, queries}, kPrompts);
      }
    }
    Compare(Kernels::kMma, {key_dim, value_dim, false, Element::kF32, 5.0F, 60}, kPrompts);
    Compare(Kernels::kMma, {key_dim, value_dim, true, Element::kBf16, 0, 50, true, true}, kPrompts);
  }
}

TEST_F(AttentionShapesOnGpu, PrefillOnMmaKeepsNanInItsRows) {
  for (const bool fp8 : {false, true}) {
    Fill({128, 128, fp8}, {{150, 0}});
    const DeviceShape small = Cards()[2].shape;
    const std::vector<float> clean = Run(Kernels::kMma, small);
    std::vector<uint8_t> cache = Download<uint8_t>(cache_);
    const int64_t element = ValueElement(70, 17);
    if (fp8) {
      cache[static_cast<size_t>(element)] = 0x7f;
    } else {
      const uint16_t bits = FloatToBf16(std::nanf(""));
      std::memcpy(&cache[static_cast<size_t>(2 * element)], &bits, 2);
    }
    ASSERT_TRUE(cache_.CopyFrom(cache.data(), static_cast<int64_t>(cache.size())).ok());
    const std::vector<float> poisoned = Run(Kernels::kMma, small);
    for (size_t i = 0; i < clean.size(); ++i) {
      const auto feature = static_cast<int>(i % 128);
      const auto head = static_cast<int>(i / 128 % 6);
      const auto token = static_cast<int>(i / 128 / 6);
      if (token >= 70 && head < 3 && feature == 17) {
        ASSERT_TRUE(std::isnan(poisoned[i])) << token << " " << head;
      } else {
        ASSERT_NEAR(poisoned[i], clean[i], 1e-5) << token << " " << head << " " << feature;
      }
    }
  }
}

TEST_F(AttentionShapesOnGpu, Decode) {
  const std::vector<Feed> tokens = {{1, 0}, {1, 700}, {1, 40}, {1, 129}};
  for (const auto& [key_dim, value_dim] :
       {std::pair{64, 64}, {128, 128}, {192, 128}, {256, 256}, {256, 128}, {512, 512}, {512, 64}}) {
    for (const bool fp8 : {false, true}) {
      Compare(Kernels::kDecode, {key_dim, value_dim, fp8}, tokens);
      Compare(Kernels::kDecode, {key_dim, value_dim, fp8, Element::kBf16, 5.0F, 100, false, true},
              tokens);
    }
  }
}

TEST_F(AttentionShapesOnGpu, Latents) {
  for (const bool fp8 : {false, true}) {
    for (const int group : {16, 5}) {
      AttentionCase of = {576, 512, fp8, Element::kF32};
      of.latent = true;
      of.kv_heads = 1;
      of.group = group;
      Compare(Kernels::kLatent, of, {{1, 300}, {40, 10}, {1, 0}});
      of.key_dim = 96;
      of.value_dim = 64;
      Compare(Kernels::kLatent, of, {{1, 300}, {40, 10}, {1, 0}});
      of.latent = false;
      of.key_dim = 512;
      of.value_dim = 400;
      of.window = 50;
      Compare(Kernels::kLatent, of, {{1, 300}, {40, 10}, {1, 0}});
    }
  }
}

// The bits do not depend on the tile, and so not on the card.
TEST_F(AttentionShapesOnGpu, ExactAttentionHasTheSameBits) {
  for (const int key_dim : {128, 512, 576, 1024}) {
    Fill({key_dim, 128, false, Element::kF32, 0, 0, false, true}, kPrompts);
    const std::vector<float> expected = Run(Kernels::kExact, own_);
    for (const Card& card : Cards()) {
      if (card.shape.shared_bytes > own_.shared_bytes) continue;
      EXPECT_EQ(Run(Kernels::kExact, card.shape), expected) << card.name << " " << key_dim;
    }
  }
}

}  // namespace
}  // namespace marlin::cuda::attention_shapes_gpu_test
