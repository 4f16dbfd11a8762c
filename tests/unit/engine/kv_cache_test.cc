// KV cache pages: their allocation, the ones that a window keeps, and how far a sequence can be
// truncated.
#include "engine/kv_cache.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "../../source_directory.h"
#include "marlin/model.h"
#include "random_model.h"
#include "remote_backend.h"

namespace marlin::kv_cache_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

CacheShape Shape3(const std::vector<int64_t>& windows, int64_t heads = 2) {
  CacheShape shape;
  for (const int64_t window : windows) shape.layers.push_back({{heads, 32, 16}, window});
  shape.type = DType::kBf16;
  return shape;
}

std::shared_ptr<PagePool> MakePool(const Device& device, const CacheShape& shape) {
  auto pool = PagePool::Make(device, shape);
  EXPECT_TRUE(pool.ok()) << pool.status().message();
  return *pool;
}

TEST(PagePool, LayersWithOneWindowSharePages) {
  const Device device = *Device::Open("cpu", {.threads = 1});
  const auto pool = MakePool(device, Shape3({0, 128, 0, 128, 128}));
  ASSERT_EQ(pool->groups(), 2U);
  EXPECT_EQ(pool->WindowOf(pool->GroupOf(2)), 0);
  EXPECT_EQ(pool->WindowOf(pool->GroupOf(4)), 128);
  std::set<int64_t> places;
  for (const int64_t layer : {1, 3, 4}) {
    const PagedCache cache = pool->CacheOf(layer, {});
    places.insert(cache.first_element);
    EXPECT_EQ(cache.page_stride, 3 * 2 * 256 * (32 + 16));
    EXPECT_EQ(cache.page_tokens, 256);
  }
  EXPECT_THAT(places, ElementsAre(0, 2 * 256 * 48, 2 * 2 * 256 * 48));
}

TEST(PagePool, LayersThatReadOthersHaveTheirPages) {
  const Device device = *Device::Open("cpu", {.threads = 1});
  CacheShape shape = Shape3({128, 0, 128, 0});
  shape.layers[2] = {{}, 128, 0};
  shape.layers[3] = {{}, 0, 1};
  const auto pool = MakePool(device, shape);
  ASSERT_EQ(pool->groups(), 2U);
  for (const int64_t layer : {2, 3}) {
    EXPECT_EQ(pool->GroupOf(layer), pool->GroupOf(layer - 2));
    const PagedCache cache = pool->CacheOf(layer, {});
    EXPECT_EQ(cache.first_element, 0);
    EXPECT_EQ(cache.page_stride, 2 * 256 * (32 + 16));
    EXPECT_EQ(cache.kv_heads, 2);
  }
}

// Layers of different mixers have pages of their own size.
TEST(PagePool, LayersWithOneStateSharePages) {
  const Device device = *Device::Open("cpu", {.threads = 1});
  CacheShape shape = Shape3({0, 0, 0});
  shape.layers[1].kept = {1, 96, 64, true};
  const auto pool = MakePool(device, shape);
  ASSERT_EQ(pool->groups(), 2U);
  EXPECT_EQ(pool->GroupOf(0), pool->GroupOf(2));
  EXPECT_EQ(pool->FirstLayerOf(pool->GroupOf(2)), 0);
  EXPECT_EQ(pool->FirstLayerOf(pool->GroupOf(1)), 1);
  EXPECT_EQ(pool->CacheOf(2, {}).page_stride, 2 * 2 * 256 * (32 + 16));
  EXPECT_EQ(pool->CacheOf(2, {}).first_element, 2 * 256 * (32 + 16));
  const PagedCache own = pool->CacheOf(1, {});
  EXPECT_EQ(own.page_stride, 256 * 96);
  EXPECT_EQ(own.kv_heads, 1);
  EXPECT_EQ(own.key_dim, 96);
  EXPECT_EQ(own.value_dim, 64);
  EXPECT_TRUE(own.values_in_keys);
  EXPECT_FALSE(pool->CacheOf(0, {}).values_in_keys);
}

TEST(PagePool, CountsTheBytesOfItsType) {
  const Device device = *Device::Open("cpu", {.threads = 1});
  for (const auto& [type, bytes] :
       {std::pair<DType, int64_t>{DType::kF32, 4}, {DType::kBf16, 2}, {DType::kF8E4M3, 1}}) {
    CacheShape shape = Shape3({0, 0});
    shape.type = type;
    const int64_t page = int64_t{2} * 2 * 256 * (32 + 16) * bytes;
    shape.most_bytes = 3 * page;
    const auto pool = MakePool(device, shape);
    EXPECT_EQ(pool->CacheOf(0, {}).type, type);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(pool->Take(0).ok()) << DTypeName(type);
    const Result<int32_t> page_too_many = pool->Take(0);
    ASSERT_FALSE(page_too_many.ok()) << DTypeName(type);
    EXPECT_THAT(
        page_too_many.status().message(),
        HasSubstr(fmt::format("more than the {} in use do not fit in its {}", 3 * page, 3 * page)));
  }
}

// A slab that one group keeps for its next sequence does not take another group's last memory.
TEST(PagePool, AKeptSlabGoesToTheGroupThatNeedsIt) {
  const Device device = *Device::Open("cpu", {.threads = 1});
  CacheShape shape = Shape3({0, 128});
  shape.most_bytes = int64_t{2} * 2 * 256 * (32 + 16) * 2;
  const auto pool = MakePool(device, shape);
  const Result<int32_t> first = pool->Take(0);
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(pool->Take(1).ok());
  EXPECT_EQ(pool->Take(1).status().code(), Code::kOutOfMemory);
  pool->Return(0, *first);
  EXPECT_TRUE(pool->Take(1).ok());
  EXPECT_EQ(pool->Take(0).status().code(), Code::kOutOfMemory);
}

TEST(CacheType, IsOneOfThoseThatModelsTake) {
  EXPECT_EQ(*CacheType({}), DType::kBf16);
  EXPECT_EQ(*CacheType({.allow_bf16_activations = false}), DType::kF32);
  ModelOptions options{.allow_bf16_activations = false};
  for (const char* const name : {"f32", "bf16", "fp8_e4m3"}) {
    options.kv_cache = *ParseKvCacheType(name);
    EXPECT_EQ(*CacheType(options), *options.kv_cache);
    EXPECT_EQ(KvCacheTypeName(*options.kv_cache), name);
  }
  options.kv_cache = DType::kF16;
  const Status refused = CacheType(options).status();
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_EQ(refused.message(), "kv_cache: expected f32, bf16 or fp8_e4m3, got 'f16'");
  const Status opened =
      Model::Open(SourceDirectory() + "/examples/tiny-qwen3-moe", *Device::Open("cpu"), options)
          .status();
  EXPECT_EQ(opened.message(), refused.message());
  for (const char* const name : {"", "fp8", "f8_e4m3", "BF16", "bf16 "}) {
    EXPECT_THAT(ParseKvCacheType(name).status().message(),
                HasSubstr("expected f32, bf16 or fp8_e4m3, got '"));
  }
}

TEST(PagePool, PagesComeBackAndSlabsGo) {
  const Device device = *Device::Open("cpu", {.threads = 1});
  // A page of 3 MiB fills a slab; of 48 KiB 21 pages do.
  for (const int64_t heads : {64, 2}) {
    const auto pool = MakePool(device, Shape3({0, 0}, heads));
    const auto slabs = [&] {
      const std::vector<void*> all = pool->Slabs(0);
      return all.size() - static_cast<size_t>(std::count(all.begin(), all.end(), nullptr));
    };
    std::vector<int32_t> pages;
    for (int i = 0; i < 30; ++i) pages.push_back(*pool->Take(0));
    EXPECT_EQ(std::set<int32_t>(pages.begin(), pages.end()).size(), pages.size());
    const size_t most = slabs();
    EXPECT_EQ(most, heads == 64 ? 30U : 3U);
    for (const int32_t page : pages) pool->Return(0, page);
    EXPECT_EQ(slabs(), 1U);
    pages.clear();
    for (int i = 0; i < 30; ++i) pages.push_back(*pool->Take(0));
    EXPECT_EQ(std::set<int32_t>(pages.begin(), pages.end()).size(), pages.size());
    EXPECT_EQ(slabs(), most);
    EXPECT_EQ(pool->Slabs(0).size(), most);
  }
}

// A GPU's kernels take the addresses of up to 64 slabs as arguments.
TEST(PagePool, TheMemoryOfADeviceHasFewSlabs) {
  const Device device = testing::OpenRemote({});
  const int64_t page = int64_t{2} * 256 * (32 + 16) * 2;
  for (const int64_t pages : {int64_t{3}, int64_t{1000}, int64_t{100000}, int64_t{3000000}}) {
    for (const auto& windows : {std::vector<int64_t>{0}, {0, 128}}) {
      CacheShape shape = Shape3(windows);
      shape.most_bytes = pages * page;
      const int64_t of_slab = MakePool(device, shape)->CacheOf(0, {}).slab_pages;
      EXPECT_LE(of_slab, std::max<int64_t>(pages / std::ssize(windows), 1));
      EXPECT_LE(pages / of_slab, pages < 100 ? pages : 64);
      EXPECT_GE(of_slab * page, std::min(pages / std::ssize(windows) * page, int64_t{63} << 20));
    }
  }
  EXPECT_EQ(MakePool(device, Shape3({0}))->CacheOf(0, {}).slab_pages, (int64_t{64} << 20) / page);
}

TEST(KvCache, AWindowKeepsThePagesThatItReaches) {
  const Device device = *Device::Open("cpu", {.threads = 1});
  const auto pool = MakePool(device, Shape3({0, 300}));
  KvCache cache(pool, false);
  const auto kept = [&](size_t group) {
    std::vector<size_t> blocks;
    for (size_t i = 0; i < cache.Blocks(group).size(); ++i) {
      if (cache.Blocks(group)[i] >= 0) blocks.push_back(i);
    }
    return blocks;
  };
  for (int64_t length = 0; length < 1000; length += 100) {
    ASSERT_TRUE(cache.Reserve(length, length + 100).ok());
    cache.Grow(length + 100);
  }
  // The window of position 900 starts at 601, in block 2.
  EXPECT_THAT(kept(0), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(kept(1), ElementsAre(2, 3));
  EXPECT_EQ(cache.ShortestLength(), 2 * 256 + 299);

  // A call with several forward passes keeps its initial pages until it succeeds.
  ASSERT_TRUE(cache.Reserve(1000, 1512).ok());
  ASSERT_TRUE(cache.Reserve(1512, 2024).ok());
  EXPECT_THAT(kept(1), ElementsAre(2, 3, 4, 5, 6, 7));
  ASSERT_TRUE(cache.Reserve(1000, 1512).ok());
  cache.Grow(2024);
  ASSERT_TRUE(cache.Reserve(2024, 2025).ok());
  EXPECT_THAT(kept(1), ElementsAre(6, 7));
  cache.Truncate(0);
  ASSERT_TRUE(cache.Reserve(0, 600).ok());
  EXPECT_THAT(kept(1), ElementsAre(0, 1, 2));
}

/// The page of a sequence's recurrent state, and the one for the next.
std::vector<int32_t> StatesOf(const KvCache& cache, size_t group) {
  const std::span<const int32_t> pages = cache.TableFrom(group, cache.length());
  return {pages.begin(), pages.end()};
}

TEST(KvCache, AStateIsReplacedOnlyByACallThatSucceeds) {
  CacheShape shape = Shape3({0, 0, 0});
  shape.layers[1].kept = shape.layers[2].kept = MixerState{.fixed = 3000};
  const auto pool = MakePool(*Device::Open("cpu", {.threads = 1}), shape);
  EXPECT_EQ(pool->PageBytes(1), 2 * 3008 * 4);
  EXPECT_EQ(pool->StatesOf(2, {}).first_element, 3008);
  KvCache cache(pool, true);
  EXPECT_THAT(StatesOf(cache, 1), ElementsAre(-1, -1));
  ASSERT_TRUE(cache.Reserve(0, 10).ok());
  const int32_t first = StatesOf(cache, 1)[1];
  EXPECT_GE(first, 0);
  const std::span<const int32_t> later = cache.TableFrom(1, 5);
  EXPECT_THAT(std::vector<int32_t>(later.begin(), later.end()), ElementsAre(first, first));
  ASSERT_TRUE(cache.Reserve(5, 10).ok());
  cache.Grow(10);
  EXPECT_THAT(StatesOf(cache, 1), ElementsAre(first, -1));
  for (int failed = 0; failed < 3; ++failed) {
    ASSERT_TRUE(cache.Reserve(10, 20).ok());
    EXPECT_EQ(StatesOf(cache, 1)[0], first);
    EXPECT_EQ(pool->statistics().states_used, 2);
    cache.Grow(10);
    EXPECT_EQ(pool->statistics().states_used, 1);
  }
  cache.KeepStates();
  ASSERT_TRUE(cache.Reserve(10, 20).ok());
  cache.Grow(20);
  EXPECT_FALSE(cache.Truncate(11));
  EXPECT_EQ(cache.length(), 20);
  for (int again = 0; again < 2; ++again) {
    EXPECT_TRUE(cache.Truncate(10));
    EXPECT_THAT(StatesOf(cache, 1), ElementsAre(first, -1));
    ASSERT_TRUE(cache.Reserve(10, 20).ok());
    cache.Grow(20);
  }
  EXPECT_TRUE(cache.Truncate(0));
  EXPECT_THAT(StatesOf(cache, 1), ElementsAre(-1, -1));
  EXPECT_EQ(pool->statistics().states_used, 0);
}

TEST(KvCache, AdvancesToTheStatesAfterAcceptedGuesses) {
  CacheShape shape = Shape3({0, 0, 0});
  shape.layers[1].kept = shape.layers[2].kept = MixerState{.fixed = 3000};
  const auto pool = MakePool(*Device::Open("cpu", {.threads = 1}), shape);
  KvCache cache(pool, true);
  ASSERT_TRUE(cache.Reserve(0, 10).ok());
  cache.Grow(10);
  int64_t fed = 10;
  for (const int64_t sampled : {1, 4, 2, 3}) {
    const int32_t before = StatesOf(cache, 1)[0];
    ASSERT_TRUE(cache.Reserve(fed, fed + 4, 3).ok());
    EXPECT_EQ(pool->statistics().states_used, 5);
    std::set<int32_t> pages = {before};
    for (int64_t row = 0; row < 4; ++row) {
      const auto [from, to] = cache.TableOfRow(1, row);
      EXPECT_EQ(from, row == 0 ? before : cache.TableOfRow(1, row - 1)[1]);
      pages.insert(to);
    }
    EXPECT_EQ(pages.size(), 5U);
    const int32_t after = cache.TableOfRow(1, sampled - 1)[1];
    fed += sampled;
    cache.Grow(fed);
    EXPECT_THAT(StatesOf(cache, 1), ElementsAre(after, -1));
  }
  // A call that fails, and one without guesses, give their pages back.
  ASSERT_TRUE(cache.Reserve(fed, fed + 4, 3).ok());
  cache.Grow(fed);
  EXPECT_EQ(pool->statistics().states_used, 1);
  ASSERT_TRUE(cache.Reserve(fed, fed + 3, 2).ok());
  ASSERT_TRUE(cache.Reserve(fed, fed + 1).ok());
  EXPECT_EQ(pool->statistics().states_used, 4);
  ASSERT_TRUE(cache.Reserve(fed, fed + 1, 0).ok());
  EXPECT_EQ(pool->statistics().states_used, 2);
  cache.Grow(fed + 1);
  EXPECT_EQ(pool->statistics().states_used, 1);
}

// A state of 2 MiB has a slab of its own.
TEST(KvCache, CallsDoNotAllocateStatesAgain) {
  CacheShape shape = Shape3({0});
  shape.layers[0].kept = MixerState{.fixed = 1 << 19};
  const auto pool = MakePool(*Device::Open("cpu", {.threads = 1}), shape);
  const int64_t state = pool->PageBytes(0);
  int64_t allocated = 0;
  {
    std::vector<std::unique_ptr<KvCache>> caches;
    for (int i = 0; i < 4; ++i) caches.push_back(std::make_unique<KvCache>(pool, false));
    for (int call = 0; call < 3; ++call) {
      for (const auto& cache : caches) {
        ASSERT_TRUE(cache->Reserve(cache->length(), cache->length() + 1).ok());
      }
      for (const auto& cache : caches) cache->Grow(cache->length() + 1);
      EXPECT_EQ(pool->statistics().bytes_allocated, (call == 0 ? 4 : 8) * state);
    }
  }
  EXPECT_EQ(pool->statistics().bytes_allocated, state);
  // Nor pages for guesses, which are taken once a pass is planned.
  KvCache cache(pool, false);
  for (int64_t call = 0; call < 6; ++call) {
    ASSERT_TRUE(cache.Reserve(cache.length(), cache.length() + 1).ok());
    ASSERT_TRUE(cache.Reserve(cache.length(), cache.length() + 4, 3).ok());
    cache.Grow(cache.length() + 1 + call % 4);
    if (call > 1) {
      EXPECT_EQ(pool->statistics().bytes_allocated, allocated) << call;
    }
    allocated = pool->statistics().bytes_allocated;
  }
}

TEST(KvCache, ATruncatableOneKeepsAll) {
  const Device device = *Device::Open("cpu", {.threads = 1});
  KvCache cache(MakePool(device, Shape3({20})), true);
  ASSERT_TRUE(cache.Reserve(0, 1000).ok());
  cache.Grow(1000);
  ASSERT_TRUE(cache.Reserve(1000, 1001).ok());
  EXPECT_EQ(std::count(cache.Blocks(0).begin(), cache.Blocks(0).end(), -1), 0);
  EXPECT_EQ(cache.ShortestLength(), 0);
}

/// A model whose last layers have a window of 40 tokens.
class Windows : public ::testing::Test {
 protected:
  void SetUp() override {
    testing::WriteQwen2(directory_.path(), 40);
    auto model = Model::Open(directory_.path(), *Device::Open("cpu", {.threads = 2}));
    ASSERT_TRUE(model.ok()) << model.status().message();
    model_ = *model;
  }
  /// Returns the logits after the next `count` tokens of the sequence.
  std::vector<float> Feed(Sequence* sequence, int64_t count) {
    std::vector<float> logits(128);
    const auto first = static_cast<size_t>(sequence->length());
    const SequenceInput input{sequence,
                              std::span(tokens_).subspan(first, static_cast<size_t>(count))};
    const Status status = model_->Forward({&input, 1}, {logits.data(), DType::kF32, {1, 128}});
    EXPECT_TRUE(status.ok()) << status.message();
    return logits;
  }

  testing::TemporaryDirectory directory_;
  std::optional<Model> model_;
  const std::vector<int32_t> tokens_ = testing::TokensBelow(128, 3000);
};

TEST_F(Windows, DroppedPagesChangeNoBit) {
  Sequence all = *model_->NewSequence();
  Sequence some = *model_->NewSequence({.truncatable = false});
  for (const int64_t count : {3, 600, 1, 1, 700, 1, 250, 1, 1}) {
    EXPECT_EQ(Feed(&some, count), Feed(&all, count)) << all.length();
  }
  const auto dropped = [](const Sequence& sequence) {
    const std::vector<int32_t>& blocks = sequence.state()->cache.Blocks(1);
    return std::count(blocks.begin(), blocks.end(), -1);
  };
  EXPECT_EQ(dropped(all), 0);
  EXPECT_EQ(dropped(some), 5);
}

TEST_F(Windows, TruncateTakesWhatIsThere) {
  Sequence all = *model_->NewSequence();
  Sequence some = *model_->NewSequence({.truncatable = false});
  for (Sequence* const sequence : {&all, &some}) {
    Feed(sequence, 1000);
    Feed(sequence, 1);
  }
  const Status status = some.Truncate(806);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(),
              HasSubstr("length: expected 0 or 807..1001 (the windows before are gone), got 806"));
  for (const int64_t length : {900, 807, 0}) {
    ASSERT_TRUE(all.Truncate(length).ok());
    ASSERT_TRUE(some.Truncate(length).ok());
    EXPECT_EQ(some.length(), length);
    EXPECT_EQ(Feed(&some, 7), Feed(&all, 7)) << length;
  }
}

}  // namespace
}  // namespace marlin::kv_cache_test
