// Pages that sequences share: which are found, which are given up first, and that none is written
// to while another sequence can see it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/cache/prefix_tree.h"
#include "engine/kv_cache.h"

namespace marlin::prefix_cache_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using Tokens = std::vector<int32_t>;

constexpr int64_t kPage = 256;
constexpr int64_t kPageBytes = kPage * 2 * (32 + 16) * 2;

/// In the place of a layer's window: it keeps a recurrent state.
constexpr int64_t kRecurrent = -1;

/// A page of a layer has 48 KiB, a state 12,032 bytes.
CacheShape ShapeOf(const std::vector<int64_t>& windows) {
  CacheShape shape;
  for (const int64_t window : windows) {
    shape.layers.push_back(window == kRecurrent ? LayerState{MixerState{.fixed = 3000}, 0}
                                                : LayerState{{2, 32, 16}, window});
  }
  shape.type = DType::kBf16;
  return shape;
}

std::shared_ptr<PagePool> MakePool(const CacheShape& shape,
                                   PrefixTree::Hash hash = &PrefixTree::HashOf) {
  auto pool = PagePool::Make(*Device::Open("cpu", {.threads = 1}), shape, hash);
  EXPECT_TRUE(pool.ok()) << pool.status().message();
  return *pool;
}

/// A pool of one layer with room for some pages.
std::shared_ptr<PagePool> PoolOf(int64_t pages) {
  CacheShape shape = ShapeOf({0});
  shape.most_bytes = pages * kPageBytes;
  return MakePool(shape);
}

/// Blocks of pages, each of one token, and some tokens more.
Tokens TextOf(const Tokens& blocks, int64_t more = 0) {
  Tokens tokens;
  for (const int32_t block : blocks) tokens.insert(tokens.end(), kPage, block);
  tokens.insert(tokens.end(), static_cast<size_t>(more), 7);
  return tokens;
}

/// A sequence as the scheduler runs it.
struct Text {
  Text(const std::shared_ptr<PagePool>& pool, Tokens text, std::string_view salt = "",
       bool truncatable = false)
      : tokens(std::move(text)), cache(pool, truncatable) {
    adopted = cache.Adopt(tokens, salt);
  }
  /// Feeds the tokens up to `end`.
  Status Feed(int64_t end) {
    const Status status = cache.Reserve(cache.length(), end);
    if (!status.ok()) return status;
    cache.Grow(end);
    cache.Publish(tokens);
    return {};
  }
  Status Feed() { return Feed(std::ssize(tokens)); }

  Tokens tokens;
  KvCache cache;
  int64_t adopted = 0;
};

/// Leaves a text's whole pages in the pool.
void Cache(const std::shared_ptr<PagePool>& pool, const Tokens& tokens,
           std::string_view salt = "") {
  Text text(pool, tokens, salt);
  EXPECT_TRUE(text.Feed(std::ssize(tokens) / kPage * kPage).ok());
}

int64_t Adopted(const std::shared_ptr<PagePool>& pool, const Tokens& tokens,
                std::string_view salt = "") {
  return Text(pool, tokens, salt).adopted;
}

TEST(PrefixCache, SharesWholePagesAndFeedsTheLastToken) {
  const auto pool = MakePool(ShapeOf({0, 0}));
  const Tokens tokens = TextOf({1, 2}, 88);
  Text first(pool, tokens);
  EXPECT_EQ(first.adopted, 0);
  ASSERT_TRUE(first.Feed().ok());
  EXPECT_EQ(first.cache.PublishedLength(), 2 * kPage);

  Text second(pool, tokens);
  EXPECT_EQ(second.adopted, 2 * kPage);
  EXPECT_EQ(second.cache.length(), 2 * kPage);
  ASSERT_EQ(second.cache.Blocks(0).size(), 2U);
  EXPECT_TRUE(std::equal(second.cache.Blocks(0).begin(), second.cache.Blocks(0).end(),
                         first.cache.Blocks(0).begin()));
  ASSERT_TRUE(second.Feed().ok());
  EXPECT_NE(second.cache.Blocks(0)[2], first.cache.Blocks(0)[2]);
  EXPECT_EQ(pool->statistics().pages_used, 4);

  EXPECT_EQ(Adopted(pool, TextOf({1, 2}, 1)), 2 * kPage);
  EXPECT_EQ(Adopted(pool, TextOf({1, 2})), kPage);
  EXPECT_EQ(Adopted(pool, TextOf({1, 3}, 1)), kPage);
  EXPECT_EQ(Adopted(pool, TextOf({2, 2}, 1)), 0);
  EXPECT_EQ(Adopted(pool, {}), 0);
  EXPECT_EQ(pool->statistics().pages_used, 4);
}

TEST(PrefixCache, PagesStayWithoutOwners) {
  const auto pool = MakePool(ShapeOf({0, 0}));
  Cache(pool, TextOf({1, 2}, 88));
  PoolStatistics statistics = pool->statistics();
  EXPECT_EQ(statistics.pages_used, 0);
  EXPECT_EQ(statistics.pages_cached, 2);
  EXPECT_EQ(statistics.bytes_cached, 2 * 2 * kPageBytes);
  EXPECT_EQ(statistics.prefixes, 3);
  {
    const Text text(pool, TextOf({1, 2}, 88));
    EXPECT_EQ(text.adopted, 2 * kPage);
    EXPECT_EQ(pool->statistics().pages_used, 2);
    EXPECT_EQ(pool->statistics().pages_cached, 0);
  }
  EXPECT_EQ(pool->statistics().pages_cached, 2);
  EXPECT_TRUE(pool->DropCached());
  statistics = pool->statistics();
  EXPECT_EQ(statistics.pages_cached, 0);
  EXPECT_EQ(statistics.bytes_allocated, 0);
  EXPECT_EQ(statistics.prefixes, 0);
  EXPECT_EQ(statistics.evicted_pages, 2);
  EXPECT_FALSE(pool->DropCached());
  EXPECT_EQ(Adopted(pool, TextOf({1, 2}, 88)), 0);
}

TEST(PrefixCache, ASequenceThatDoesNotAdoptPublishesNothing) {
  const auto pool = MakePool(ShapeOf({0}));
  const Tokens tokens = TextOf({1, 2}, 1);
  {
    KvCache cache(pool, true);
    ASSERT_TRUE(cache.Reserve(0, std::ssize(tokens)).ok());
    cache.Grow(std::ssize(tokens));
    cache.Publish(tokens);
    EXPECT_EQ(cache.PublishedLength(), 0);
    EXPECT_EQ(cache.Adopt(tokens, ""), 0);
  }
  EXPECT_EQ(pool->statistics().pages_cached, 0);
  EXPECT_EQ(pool->statistics().prefixes, 0);
}

TEST(PrefixCache, TokensAreComparedWhereHashesAreEqual) {
  const auto pool =
      MakePool(ShapeOf({0}), [](uint64_t, std::span<const int32_t>) { return uint64_t{42}; });
  for (const Tokens& blocks : {Tokens{1, 2, 3}, {1, 3}, {2, 2, 3}, {3, 1}}) {
    Cache(pool, TextOf(blocks, 1));
  }
  Cache(pool, TextOf({1, 2, 9}, 1), "salt");
  EXPECT_EQ(Adopted(pool, TextOf({1, 2, 3}, 1)), 3 * kPage);
  EXPECT_EQ(Adopted(pool, TextOf({2, 2, 3}, 1)), 3 * kPage);
  EXPECT_EQ(Adopted(pool, TextOf({1, 3, 3}, 1)), 2 * kPage);
  EXPECT_EQ(Adopted(pool, TextOf({2, 3, 3}, 1)), kPage);
  EXPECT_EQ(Adopted(pool, TextOf({3, 1}, 1)), 2 * kPage);
  EXPECT_EQ(Adopted(pool, TextOf({1, 2, 9}, 1)), 2 * kPage);
  EXPECT_EQ(Adopted(pool, TextOf({1, 2, 9}, 1), "salt"), 3 * kPage);
  Tokens other = TextOf({1, 2, 3}, 1);
  other[kPage + 200] = 5;
  EXPECT_EQ(Adopted(pool, other), kPage);
  pool->DropCached();
  EXPECT_EQ(pool->statistics().prefixes, 0);
}

TEST(PrefixCache, SaltsAreApart) {
  const auto pool = MakePool(ShapeOf({0}));
  const Tokens tokens = TextOf({1, 2}, 1);
  Cache(pool, tokens, "alice");
  EXPECT_EQ(Adopted(pool, tokens), 0);
  EXPECT_EQ(Adopted(pool, tokens, "bob"), 0);
  EXPECT_EQ(Adopted(pool, tokens, std::string_view("alice\0", 6)), 0);
  EXPECT_EQ(Adopted(pool, tokens, "alice"), 2 * kPage);
  // The salt is determined by the first call.
  Text text(pool, tokens, "bob");
  EXPECT_EQ(text.cache.Adopt(tokens, "alice"), 0);
}

// Several that are fed the same at a time end up with one copy.
TEST(PrefixCache, TheSamePagesAreKeptOnce) {
  const auto pool = MakePool(ShapeOf({0, 0}));
  const Tokens tokens = TextOf({1, 2, 3}, 1);
  Text a(pool, tokens);
  Text b(pool, tokens);
  ASSERT_TRUE(a.cache.Reserve(0, 3 * kPage).ok());
  ASSERT_TRUE(b.cache.Reserve(0, 3 * kPage).ok());
  EXPECT_EQ(pool->statistics().pages_used, 6);
  a.cache.Grow(3 * kPage);
  b.cache.Grow(3 * kPage);
  a.cache.Publish(tokens);
  b.cache.Publish(tokens);
  EXPECT_EQ(pool->statistics().pages_used, 3);
  EXPECT_EQ(a.cache.Blocks(0), b.cache.Blocks(0));
}

// A sequence that waited while another was fed the same takes over its pages.
TEST(PrefixCache, AdoptsWhatIsPublishedLater) {
  const auto pool = MakePool(ShapeOf({0, 300}));
  const Tokens tokens = TextOf({1, 2, 3, 4, 5}, 1);
  Text first(pool, tokens);
  Text second(pool, tokens);
  ASSERT_TRUE(first.Feed(2 * kPage + 10).ok());
  ASSERT_TRUE(second.cache.Reserve(0, 100).ok());  // Pages for a pass that did not run.
  EXPECT_EQ(second.cache.Adopt(tokens, ""), 2 * kPage);
  EXPECT_EQ(second.cache.Adopt(tokens, ""), 0);
  ASSERT_TRUE(first.Feed(5 * kPage).ok());
  EXPECT_EQ(second.cache.Adopt(tokens, ""), 3 * kPage);
  EXPECT_EQ(second.cache.length(), 5 * kPage);
  EXPECT_EQ(second.cache.Blocks(0), first.cache.Blocks(0));
  // The window of position 1280 starts at 981, in block 3.
  EXPECT_THAT(
      std::vector<int32_t>(second.cache.Blocks(1).begin(), second.cache.Blocks(1).begin() + 3),
      Each(-1));
  EXPECT_GE(second.cache.Blocks(1)[3], 0);
  EXPECT_EQ(second.cache.ShortestLength(), 3 * kPage + 299);

  Text third(pool, tokens);
  ASSERT_EQ(third.adopted, 5 * kPage);
  ASSERT_TRUE(third.Feed().ok());
  EXPECT_EQ(third.cache.Adopt(tokens, ""), 0);  // It is inside a page.
}

/// The blocks of texts that are found.
std::vector<int64_t> Found(const std::shared_ptr<PagePool>& pool,
                           const std::vector<Tokens>& texts) {
  std::vector<int64_t> found;
  for (const Tokens& blocks : texts) found.push_back(Adopted(pool, TextOf(blocks, 1)) / kPage);
  return found;
}

TEST(PrefixCache, PagesThatWereGivenBackFirstGoFirst) {
  const std::vector<int64_t> want[] = {{2, 2, 2}, {2, 1, 2}, {2, 0, 2}, {2, 0, 1},
                                       {2, 0, 0}, {1, 0, 0}, {0, 0, 0}};
  for (size_t takes = 0; takes < 7; ++takes) {
    const auto pool = PoolOf(6);
    const std::vector<Tokens> texts = {{1, 2}, {3, 4}, {5, 6}};
    for (const Tokens& blocks : texts) Cache(pool, TextOf(blocks, 1));
    EXPECT_EQ(pool->statistics().pages_cached, 6);
    EXPECT_THAT(Found(pool, {{1, 2}}), ElementsAre(2));  // It is now the youngest.
    std::vector<int32_t> pages;
    for (size_t i = 0; i < takes; ++i) pages.push_back(*pool->Take(0));
    EXPECT_EQ(Found(pool, texts), want[takes]) << takes;
    EXPECT_EQ(pool->statistics().evicted_pages, static_cast<int64_t>(takes));
    if (takes == 6) {
      EXPECT_EQ(pool->Take(0).status().code(), Code::kOutOfMemory);
    }
    for (const int32_t page : pages) pool->Return(0, page);
    EXPECT_EQ(pool->statistics().pages_used, 0);
  }
}

TEST(PrefixCache, PagesInUseAreNotGivenUp) {
  const auto pool = PoolOf(4);
  Cache(pool, TextOf({1, 2}, 1));
  Text text(pool, TextOf({1, 2}, 1));
  Cache(pool, TextOf({3}, 1));
  ASSERT_TRUE(text.Feed().ok());
  const auto last = pool->Take(0);
  ASSERT_TRUE(last.ok());
  EXPECT_EQ(pool->Take(0).status().code(), Code::kOutOfMemory);
  EXPECT_THAT(Found(pool, {{1, 2}, {3}}), ElementsAre(2, 0));
  pool->Return(0, *last);
}

TEST(PrefixCache, MemoryComesFirstAndOtherGroupsGiveTheirs) {
  CacheShape shape = ShapeOf({0, 300});
  shape.most_bytes = 7 * kPageBytes;
  const auto pool = MakePool(shape);
  ASSERT_EQ(pool->groups(), 2U);
  Cache(pool, TextOf({1, 2}, 1));
  EXPECT_EQ(pool->statistics().pages_cached, 4);
  // Slabs have three pages: the second group's goes, once its two cached pages are given up.
  std::vector<int32_t> pages;
  for (int i = 0; i < 6; ++i) {
    const auto page = pool->Take(0);
    ASSERT_TRUE(page.ok()) << i << page.status().message();
    pages.push_back(*page);
    EXPECT_EQ(pool->statistics().evicted_pages, i == 0 ? 0 : i < 3 ? 2 * i - 1 : 4);
  }
  EXPECT_EQ(std::set<int32_t>(pages.begin(), pages.end()).size(), pages.size());
  EXPECT_EQ(pool->Take(0).status().code(), Code::kOutOfMemory);
  EXPECT_EQ(pool->Take(1).status().code(), Code::kOutOfMemory);
  for (const int32_t page : pages) pool->Return(0, page);
}

TEST(PrefixCache, CachedPagesHaveABound) {
  const auto pool = MakePool(ShapeOf({0}));
  pool->KeepAtMost(3 * kPageBytes);
  Cache(pool, TextOf({1, 2}, 1));
  Cache(pool, TextOf({3, 4}, 1));
  EXPECT_EQ(pool->statistics().pages_cached, 3);
  EXPECT_THAT(Found(pool, {{1, 2}, {3, 4}}), ElementsAre(1, 2));
  {
    // The bound is for pages that nobody has.
    Text text(pool, TextOf({5, 6, 7, 8, 9}, 1));
    ASSERT_TRUE(text.Feed().ok());
    EXPECT_EQ(pool->statistics().pages_cached, 3);
    EXPECT_EQ(pool->statistics().pages_used, 6);
  }
  EXPECT_EQ(pool->statistics().pages_cached, 3);
  EXPECT_THAT(Found(pool, {{1, 2}, {3, 4}, {5, 6, 7, 8, 9}}), ElementsAre(0, 0, 3));
  pool->KeepAtMost(kPageBytes);
  EXPECT_THAT(Found(pool, {{5, 6, 7, 8, 9}}), ElementsAre(1));
  pool->KeepAtMost(0);
  Cache(pool, TextOf({1, 2}, 1));
  EXPECT_EQ(pool->statistics().pages_cached, 0);
  EXPECT_EQ(pool->statistics().prefixes, 0);
}

// Adopting gives back the pages that the new window does not see, and that may evict others, but
// none of those that are being adopted.
TEST(PrefixCache, AdoptingKeepsWhatItAdopts) {
  const auto pool = MakePool(ShapeOf({300}));
  const Tokens tokens = TextOf({1, 2, 3, 4, 5, 6}, 1);
  Text waits(pool, tokens);
  Text first(pool, tokens, "", true);
  ASSERT_TRUE(first.Feed(2 * kPage).ok());
  EXPECT_EQ(waits.cache.Adopt(tokens, ""), 2 * kPage);
  ASSERT_TRUE(first.Feed().ok());
  first.cache.Truncate(0);
  pool->KeepAtMost(4 * kPageBytes);
  EXPECT_EQ(waits.cache.Adopt(tokens, ""), 4 * kPage);
  EXPECT_THAT(
      std::vector<int32_t>(waits.cache.Blocks(0).begin(), waits.cache.Blocks(0).begin() + 4),
      Each(-1));
  EXPECT_GE(waits.cache.Blocks(0)[4], 0);
  EXPECT_NE(waits.cache.Blocks(0)[4], waits.cache.Blocks(0)[5]);
}

TEST(PrefixCache, AWindowNeedsOnlyThePagesItSees) {
  const auto pool = MakePool(ShapeOf({0, 300}));
  const Tokens tokens = TextOf({1, 2, 3, 4, 5}, 1);
  {
    Text text(pool, tokens);
    for (const int64_t end : {2 * kPage, 3 * kPage, 4 * kPage, 5 * kPage + 1}) {
      ASSERT_TRUE(text.Feed(end).ok());
    }
    EXPECT_EQ(text.cache.Blocks(1)[1], -1);
    EXPECT_GE(text.cache.Blocks(0)[0], 0);
  }
  // The pages that the window passed are the oldest: the text is found without them.
  EXPECT_EQ(pool->statistics().pages_cached, 10);
  pool->KeepAtMost(8 * kPageBytes);
  EXPECT_EQ(pool->statistics().pages_cached, 8);
  {
    Text text(pool, tokens);
    EXPECT_EQ(text.adopted, 5 * kPage);
    EXPECT_EQ(std::count(text.cache.Blocks(0).begin(), text.cache.Blocks(0).end(), -1), 0);
    EXPECT_EQ(std::count(text.cache.Blocks(1).begin(), text.cache.Blocks(1).end(), -1), 3);
    EXPECT_EQ(text.cache.ShortestLength(), 3 * kPage + 299);
    ASSERT_TRUE(text.Feed().ok());
  }
  // A prefix whose window was given up is not found, although the pages of other layers are there.
  EXPECT_EQ(Adopted(pool, TextOf({1, 2, 3, 9}, 1)), 0);
  EXPECT_EQ(Adopted(pool, TextOf({1, 2, 3, 4, 9}, 1)), 4 * kPage);
}

// Where all layers have windows, the tree keeps the way to the pages that are there.
TEST(PrefixCache, TheWayToAPageStays) {
  const auto pool = MakePool(ShapeOf({200}));
  const Tokens tokens = TextOf({1, 2, 3, 4}, 1);
  {
    Text text(pool, tokens);
    for (int64_t block = 1; block <= 4; ++block) ASSERT_TRUE(text.Feed(block * kPage).ok());
    ASSERT_TRUE(text.Feed().ok());
  }
  pool->KeepAtMost(kPageBytes);
  EXPECT_EQ(pool->statistics().prefixes, 5);
  Text text(pool, tokens);
  EXPECT_EQ(text.adopted, 4 * kPage);
  EXPECT_THAT(std::vector<int32_t>(text.cache.Blocks(0).begin(), text.cache.Blocks(0).begin() + 3),
              Each(-1));
  pool->KeepAtMost(0);
  EXPECT_EQ(pool->statistics().prefixes, 5);
  text.cache.Truncate(0);
  EXPECT_EQ(pool->statistics().prefixes, 1);
}

/// The page of a sequence's recurrent state, and the one for the next.
std::vector<int32_t> StatesOf(const KvCache& cache, size_t group) {
  const std::span<const int32_t> pages = cache.TableFrom(group, cache.length());
  return {pages.begin(), pages.end()};
}

TEST(PrefixCache, ATextGoesOnFromAStateThatIsThere) {
  const auto pool = MakePool(ShapeOf({0, kRecurrent}));
  const Tokens tokens = TextOf({1, 2, 3, 4}, 1);
  {
    Text text(pool, tokens);
    for (const int64_t end : {kPage + 5, 2 * kPage, 3 * kPage + 5}) {
      ASSERT_TRUE(text.Feed(end).ok());
    }
    EXPECT_EQ(pool->statistics().states_used, 1);
    EXPECT_EQ(pool->statistics().states_cached, 1);
    EXPECT_TRUE(text.cache.Truncate(2 * kPage));
    EXPECT_FALSE(text.cache.Truncate(kPage));
    ASSERT_TRUE(text.Feed().ok());
  }
  EXPECT_EQ(Adopted(pool, TextOf({1, 9}, 1)), 0);  // Its first page is there, but no state.
  EXPECT_EQ(Adopted(pool, tokens), 2 * kPage);
  // The last blocks go first; the state goes with the tokens before it.
  pool->KeepAtMost(3 * kPageBytes);
  EXPECT_EQ(Adopted(pool, tokens), 2 * kPage);
  pool->KeepAtMost(kPageBytes + kPageBytes / 2);
  EXPECT_EQ(pool->statistics().states_cached, 0);
  EXPECT_EQ(pool->statistics().pages_cached, 1);
  EXPECT_EQ(Adopted(pool, tokens), 0);
}

TEST(PrefixCache, ATruncatedSequenceWritesToPagesOfItsOwn) {
  const auto pool = MakePool(ShapeOf({0}));
  const Tokens tokens = TextOf({1, 2, 3}, 88);
  Text text(pool, tokens);
  ASSERT_TRUE(text.Feed().ok());
  EXPECT_TRUE(text.cache.DividesPublished(3 * kPage - 1));
  EXPECT_TRUE(text.cache.DividesPublished(1));
  EXPECT_FALSE(text.cache.DividesPublished(2 * kPage));
  EXPECT_FALSE(text.cache.DividesPublished(0));
  EXPECT_FALSE(text.cache.DividesPublished(3 * kPage + 5));
  // Rejected drafts are not published.
  const std::vector<int32_t> before = text.cache.Blocks(0);
  text.cache.Truncate(3 * kPage + 5);
  EXPECT_EQ(text.cache.Blocks(0), before);

  text.cache.Truncate(kPage);
  EXPECT_EQ(text.cache.PublishedLength(), kPage);
  text.tokens = TextOf({1, 4}, 1);
  ASSERT_TRUE(text.Feed().ok());
  EXPECT_EQ(text.cache.Blocks(0)[0], before[0]);
  EXPECT_EQ(text.cache.Blocks(0).size(), 3U);
  EXPECT_THAT(Found(pool, {{1, 2, 3}, {1, 4}}), ElementsAre(3, 2));
  text.cache.Truncate(0);
  text.tokens = TextOf({5}, 1);
  ASSERT_TRUE(text.Feed().ok());
  EXPECT_THAT(Found(pool, {{1, 2, 3}, {1, 4}, {5}}), ElementsAre(3, 2, 1));
  EXPECT_EQ(pool->statistics().pages_cached, 4);
}

TEST(PrefixCache, OnlyAcceptedTokensArePublished) {
  const auto pool = MakePool(ShapeOf({0}));
  Text text(pool, TextOf({1, 2}, 0));
  ASSERT_TRUE(text.cache.Reserve(0, 2 * kPage).ok());
  text.cache.Grow(2 * kPage);
  text.tokens.resize(2 * kPage - 3);  // The last three were drafts.
  text.cache.Publish(text.tokens);
  EXPECT_EQ(text.cache.PublishedLength(), kPage);
  text.cache.Truncate(2 * kPage - 3);
  text.tokens.resize(2 * kPage, 8);
  ASSERT_TRUE(text.Feed().ok());
  EXPECT_EQ(text.cache.PublishedLength(), 2 * kPage);
  EXPECT_THAT(Found(pool, {{1, 2}}), ElementsAre(1));
}

struct RandomCase {
  std::vector<int64_t> windows;
  int64_t pages;  ///< Room of the pool; 0: without a bound, and cached pages are all kept.
};

/// Random texts in a pool, with what every page must hold.
class RandomTexts {
 public:
  RandomTexts(const RandomCase& c, uint32_t seed) : case_(c), random_(seed) {
    CacheShape shape = ShapeOf(c.windows);
    if (c.pages > 0) shape.most_bytes = c.pages * kPageBytes;
    pool_ = MakePool(shape);
    pool_->KeepAtMost(INT64_MAX);
  }

  void Step() {
    const int64_t choice = Below(20);
    if (texts_.empty() || (choice < 4 && texts_.size() < 8)) return Start();
    Running& text = *texts_[static_cast<size_t>(Below(std::ssize(texts_)))];
    if (choice < 12) return Feed(text);
    if (choice < 14) return Adopt(text);
    if (choice < 16) return Truncate(text);
    if (choice < 17 && case_.pages > 0) return pool_->KeepAtMost(Below(8) * kPageBytes);
    End(text);
  }

  void Check() {
    std::set<std::pair<size_t, int32_t>> used;
    std::set<std::pair<size_t, int32_t>> states;
    for (const auto& text : texts_) {
      for (size_t group = 0; group < pool_->groups(); ++group) {
        if (pool_->IsRecurrent(group)) {
          CheckState(*text, group);
          if (text->cache.length() > 0) states.insert({group, StatesOf(text->cache, group)[0]});
          continue;
        }
        CheckPages(*text, group);
        for (const int32_t page : text->cache.Blocks(group)) {
          if (page >= 0) used.insert({group, page});
        }
      }
    }
    const PoolStatistics statistics = pool_->statistics();
    EXPECT_EQ(statistics.pages_used, std::ssize(used));
    EXPECT_EQ(statistics.states_used, std::ssize(states));
    if (case_.pages > 0) {
      EXPECT_LE(statistics.bytes_allocated, case_.pages * kPageBytes);
    }
    adopted_once_ = adopted_once_ || adopted_ > 0;
  }

  void EndAll() {
    texts_.clear();
    EXPECT_EQ(pool_->statistics().pages_used, 0);
    EXPECT_EQ(pool_->statistics().states_used, 0);
    pool_->DropCached();
    EXPECT_EQ(pool_->statistics().bytes_allocated, 0);
    EXPECT_EQ(pool_->statistics().prefixes, 0);
    EXPECT_TRUE(adopted_once_);
  }

 private:
  struct Running {
    Running(std::shared_ptr<PagePool> pool, bool truncatable, int64_t of_salt)
        : cache(std::move(pool), truncatable), salt(of_salt) {}
    KvCache cache;
    int64_t salt;
    Tokens tokens;
    int64_t published = 0;  ///< Blocks.
  };

  int64_t Below(int64_t count) {
    return std::uniform_int_distribution<int64_t>(0, count - 1)(random_);
  }
  static std::string Salt(int64_t salt) { return salt == 0 ? "" : "salt"; }
  /// Tokens that others are likely to have, too, up to a length in a block.
  void Extend(Tokens* tokens) {
    const int64_t end = std::ssize(*tokens) + 1 + Below(5 * kPage);
    while (std::ssize(*tokens) < end) {
      const int64_t rest = kPage - std::ssize(*tokens) % kPage;
      tokens->insert(tokens->end(), static_cast<size_t>(std::min(rest, end - std::ssize(*tokens))),
                     static_cast<int32_t>(Below(2)));
    }
  }

  void Start() {
    auto text = std::make_unique<Running>(pool_, Below(4) == 0, Below(2));
    Extend(&text->tokens);
    texts_.push_back(std::move(text));
    Adopt(*texts_.back());
  }

  void End(const Running& text) {
    std::erase_if(texts_, [&](const auto& other) { return other.get() == &text; });
  }

  void Adopt(Running& text) {
    const int64_t length = text.cache.length();
    const int64_t found = FoundAfter(text);
    const int64_t adopted = text.cache.Adopt(text.tokens, Salt(text.salt));
    EXPECT_EQ(text.cache.length(), length + adopted);
    // Evicted pages are not found again.
    if (case_.pages == 0) {
      EXPECT_EQ(adopted, found);
    }
    EXPECT_LE(adopted, found);
    text.published = std::max(text.published, text.cache.length() / kPage);
    adopted_ += adopted;
  }

  /// How many tokens a text could adopt if no page was ever evicted.
  int64_t FoundAfter(const Running& text) {
    const int64_t length = text.cache.length();
    if (length != text.published * kPage) return 0;
    for (int64_t block = (std::ssize(text.tokens) - 1) / kPage; block > text.published; --block) {
      bool complete = true;
      for (size_t group = 0; group < pool_->groups(); ++group) {
        if (pool_->IsRecurrent(group)) {
          complete = complete && WasPublished(text, group, block * kPage);
          continue;
        }
        for (int64_t b = pool_->FirstSeen(group, block * kPage) / kPage; b < block; ++b) {
          complete = complete && Has(text, group, b);
        }
      }
      if (complete) return block * kPage - length;
    }
    return 0;
  }
  bool Has(const Running& text, size_t group, int64_t block) {
    const auto at = static_cast<size_t>(block);
    if (block < text.published) return text.cache.Blocks(group)[at] >= 0;
    return WasPublished(text, group, (block + 1) * kPage);
  }
  bool WasPublished(const Running& text, size_t group, int64_t end) {
    return published_.contains({group, text.salt, Prefix(text, end)});
  }
  static Tokens Prefix(const Running& text, int64_t end) {
    return {text.tokens.begin(), text.tokens.begin() + end};
  }

  void Feed(Running& text) {
    KvCache& cache = text.cache;
    const int64_t length = cache.length();
    if (length == std::ssize(text.tokens)) Extend(&text.tokens);
    int64_t end = length + 1 + Below(std::ssize(text.tokens) - length);
    if (end / kPage * kPage > length && Below(2) == 0) end = end / kPage * kPage;
    const Status status = cache.Reserve(length, end);
    if (!status.ok()) {
      EXPECT_EQ(status.code(), Code::kOutOfMemory);
      EXPECT_GT(case_.pages, 0);
      cache.Release(length);
      return End(text);
    }
    for (size_t group = 0; group < pool_->groups(); ++group) Write(text, group, length, end);
    cache.Grow(end);
    for (; (text.published + 1) * kPage <= end; ++text.published) {
      for (size_t group = 0; group < pool_->groups(); ++group) {
        const bool has_page = pool_->IsRecurrent(group)
                                  ? (text.published + 1) * kPage == end
                                  : cache.Blocks(group)[static_cast<size_t>(text.published)] >= 0;
        if (!has_page) continue;
        published_.insert({group, text.salt, Prefix(text, (text.published + 1) * kPage)});
      }
    }
    cache.Publish(text.tokens);
    EXPECT_EQ(cache.PublishedLength(), text.published * kPage);
  }

  void WriteState(const Running& text, size_t group, int64_t end) {
    const int32_t page = StatesOf(text.cache, group)[1];
    ASSERT_GE(page, 0);
    contents_[{group, page}] = Prefix(text, end);
    for (const auto& other : texts_) EXPECT_NE(StatesOf(other->cache, group)[0], page);
  }

  void Write(const Running& text, size_t group, int64_t begin, int64_t end) {
    if (pool_->IsRecurrent(group)) return WriteState(text, group, end);
    for (int64_t block = begin / kPage; block * kPage < end; ++block) {
      const int32_t page = text.cache.Blocks(group)[static_cast<size_t>(block)];
      ASSERT_GE(page, 0);
      contents_[{group, page}] = Prefix(text, std::min(end, (block + 1) * kPage));
      // Nobody else may have it.
      for (const auto& other : texts_) {
        if (other.get() == &text) continue;
        EXPECT_EQ(std::ranges::count(other->cache.Blocks(group), page), 0);
      }
    }
  }

  void Truncate(Running& text) {
    const int64_t length = Below(2) == 0 ? Below(text.cache.length() + 1)
                                         : Below(text.cache.length() / kPage + 1) * kPage;
    if (length > 0 && length < text.cache.ShortestLength()) return;
    EXPECT_EQ(text.cache.DividesPublished(length),
              length < text.published * kPage && length % kPage != 0);
    if (text.cache.DividesPublished(length)) return;
    bool is_kept = length == 0 || length == text.cache.length();
    if (!is_kept) {
      is_kept = true;
      for (size_t group = 0; group < pool_->groups(); ++group) {
        if (!pool_->IsRecurrent(group)) continue;
        is_kept = is_kept && length % kPage == 0 && length <= text.published * kPage &&
                  WasPublished(text, group, length);
      }
    }
    const bool truncated = text.cache.Truncate(length);
    EXPECT_LE(truncated, is_kept);
    if (case_.pages == 0) {
      EXPECT_EQ(truncated, is_kept);
    }
    if (!truncated) return;
    text.published = std::min(text.published, length / kPage);
    text.tokens.resize(static_cast<size_t>(length));
    Extend(&text.tokens);
  }

  void CheckState(const Running& text, size_t group) {
    const std::vector<int32_t> pages = StatesOf(text.cache, group);
    const int64_t length = text.cache.length();
    EXPECT_EQ(pages[1], -1);
    EXPECT_EQ(pages[0] < 0, length == 0);
    if (length > 0) {
      EXPECT_EQ((contents_[{group, pages[0]}]), Prefix(text, length));
    }
  }

  void CheckPages(const Running& text, size_t group) {
    const int64_t length = text.cache.length();
    for (int64_t block = pool_->FirstSeen(group, length) / kPage; block * kPage < length; ++block) {
      const int32_t page = text.cache.Blocks(group)[static_cast<size_t>(block)];
      ASSERT_GE(page, 0) << block;
      const Tokens& held = contents_[{group, page}];
      const int64_t end = std::min(length, (block + 1) * kPage);
      ASSERT_GE(std::ssize(held), end);
      EXPECT_TRUE(std::equal(held.begin(), held.begin() + end, text.tokens.begin())) << block;
    }
  }

  RandomCase case_;
  std::mt19937 random_;
  std::shared_ptr<PagePool> pool_;
  std::vector<std::unique_ptr<Running>> texts_;
  /// The tokens up to the last one of a page.
  std::map<std::pair<size_t, int32_t>, Tokens> contents_;
  std::set<std::tuple<size_t, int64_t, Tokens>> published_;  ///< Group, salt, prefix.
  int64_t adopted_ = 0;
  bool adopted_once_ = false;
};

TEST(PrefixCache, RandomTextsFindWhatTheyWrote) {
  const RandomCase cases[] = {
      {{0}, 0},          {{0, 0, 300}, 0},        {{200}, 0},           {{0}, 20},
      {{0, 0, 300}, 40}, {{300, 700}, 40},        {{200}, 16},          {{0, kRecurrent}, 0},
      {{kRecurrent}, 0}, {{300, kRecurrent}, 30}, {{kRecurrent, 0}, 20}};
  for (const RandomCase& c : cases) {
    for (uint32_t seed = 1; seed <= 3; ++seed) {
      SCOPED_TRACE(::testing::PrintToString(c.windows) + ::testing::PrintToString(c.pages));
      RandomTexts texts(c, seed);
      for (int step = 0; step < 400; ++step) {
        texts.Step();
        texts.Check();
        if (::testing::Test::HasFailure()) return;
      }
      texts.EndAll();
    }
  }
}

TEST(PrefixCache, ThreadsSharePages) {
  CacheShape shape = ShapeOf({0, 300});
  shape.most_bytes = 60 * kPageBytes;
  const auto pool = MakePool(shape);
  std::vector<std::thread> threads;
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    threads.emplace_back([&pool, seed] {
      std::mt19937 random(seed);
      for (int i = 0; i < 100; ++i) {
        Tokens blocks(1 + random() % 5);
        for (int32_t& block : blocks) block = static_cast<int32_t>(random() % 2);
        Text text(pool, TextOf(blocks, 1), random() % 2 == 0 ? "" : "salt");
        for (int64_t end = text.adopted + kPage / 2; end <= std::ssize(text.tokens);
             end += kPage / 2) {
          if (!text.Feed(end).ok()) break;
        }
        pool->statistics();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool->statistics().pages_used, 0);
  EXPECT_GT(pool->statistics().pages_cached, 0);
}

}  // namespace
}  // namespace marlin::prefix_cache_test
