// ExpertCache: bounds, policies, pins, errors, threads.
#include "marlin/expert_cache.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/internals.h"
#include "marlin/quantize.h"

namespace marlin::expert_cache_test {
namespace {

constexpr int64_t kBytes = 100;

Result<Expert> Nothing(const ExpertKey& /*key*/) { return Expert(); }

/// A cache of entries of kBytes.
class Cache {
 public:
  Cache(int64_t entries, CachePolicy policy, int64_t half_life = 1 << 18)
      : cache_({entries * kBytes, policy, half_life}) {}

  Result<ExpertLease> Get(int64_t expert) { return cache_.Get({0, expert}, kBytes, Nothing); }
  void Use(std::initializer_list<int64_t> experts) {
    for (const int64_t expert : experts) {
      const Result<ExpertLease> lease = Get(expert);
      ASSERT_TRUE(lease.ok()) << lease.status().message();
    }
  }
  /// Whether an expert is there; finding out counts as a use.
  bool Holds(int64_t expert) {
    const int64_t hits = cache_.statistics().hits;
    Use({expert});
    return cache_.statistics().hits > hits;
  }
  ExpertCache& operator*() { return cache_; }
  ExpertCache* operator->() { return &cache_; }

 private:
  ExpertCache cache_;
};

std::string Message(const Status& status, Code code) {
  EXPECT_EQ(status.code(), code) << status.message();
  return std::string(status.message());
}

TEST(ExpertCache, HoldsHalfAGibibyteByDefault) {
  EXPECT_EQ(ExpertCacheOptions().capacity_bytes, 536870912);
  EXPECT_EQ(ExpertCache().statistics().bytes, 0);
}

TEST(ExpertCache, EvictsTheLeastRecentlyUsed) {
  Cache cache(3, CachePolicy::kLru);
  cache.Use({1, 2, 3, 1, 4});
  EXPECT_TRUE(cache.Holds(1));
  EXPECT_TRUE(cache.Holds(3));
  EXPECT_TRUE(cache.Holds(4));
  EXPECT_FALSE(cache.Holds(2));
}

TEST(ExpertCache, EvictsTheLeastFrequentlyUsed) {
  Cache cache(3, CachePolicy::kFrequency);
  cache.Use({1, 1, 1, 2, 2, 3, 4});
  EXPECT_TRUE(cache.Holds(1));
  EXPECT_TRUE(cache.Holds(2));
  EXPECT_TRUE(cache.Holds(4));
  EXPECT_FALSE(cache.Holds(3));
}

TEST(ExpertCache, UsesOfLongAgoDoNotCountForEver) {
  for (const int64_t half_life : {10, 1000}) {
    Cache cache(2, CachePolicy::kFrequency, half_life);
    for (int i = 0; i < 20; ++i) cache.Use({1});
    for (int i = 0; i < 15; ++i) cache.Use({2, 3});
    // With the short half-life, the last 15 uses of 2 and 3 count more than 20 before them.
    EXPECT_EQ(cache.Holds(1), half_life == 1000);
  }
}

TEST(ExpertCache, RemembersUsesOfEvictedExperts) {
  // More experts take turns than there is room for: LRU never has the next one, and one that
  // forgot evicted experts would do no better.
  Cache recent(2, CachePolicy::kLru);
  Cache frequent(2, CachePolicy::kFrequency);
  for (int i = 0; i < 100; ++i) {
    recent.Use({1, 2, 3, 1, 4, 5});
    frequent.Use({1, 2, 3, 1, 4, 5});
  }
  EXPECT_EQ(recent->statistics().hits, 0);
  EXPECT_GT(frequent->statistics().hits, 190);
}

TEST(ExpertCache, CountsWhatItDoes) {
  Cache cache(2, CachePolicy::kLru);
  cache.Use({1, 2, 1, 3, 1});
  const ExpertCacheStatistics statistics = cache->statistics();
  EXPECT_EQ(statistics.hits, 2);
  EXPECT_EQ(statistics.misses, 3);
  EXPECT_EQ(statistics.evictions, 1);
  EXPECT_EQ(statistics.loaded_bytes, 3 * kBytes);
  EXPECT_EQ(statistics.entries, 2);
  EXPECT_EQ(statistics.bytes, 2 * kBytes);
}

TEST(ExpertCache, RefusesWhatIsLargerThanItself) {
  ExpertCache cache({1000});
  EXPECT_EQ(Message(cache.Get({3, 7}, 1001, Nothing).status(), Code::kInvalidArgument),
            "expert cache: layer 3, expert 7: 1001 bytes, the capacity is 1000");
  EXPECT_TRUE(cache.Get({3, 7}, 1000, Nothing).ok());
  EXPECT_EQ(Message(cache.Get({0, 0}, -1, Nothing).status(), Code::kInvalidArgument),
            "expert cache: layer 0, expert 0: -1 bytes, the capacity is 1000");
  EXPECT_EQ(cache.statistics().entries, 1);
}

TEST(ExpertCache, KeepsWhatIsInUse) {
  Cache cache(2, CachePolicy::kLru);
  Result<ExpertLease> first = cache.Get(1);
  const Result<ExpertLease> second = cache.Get(2);
  EXPECT_EQ(Message(cache.Get(3).status(), Code::kOutOfMemory),
            "expert cache: layer 0, expert 3: 100 bytes, 200 of 200 are in use or pinned");
  *first = ExpertLease();
  cache.Use({3});
  EXPECT_TRUE(cache.Holds(2));
}

TEST(ExpertCache, KeepsWhatIsPinned) {
  Cache cache(2, CachePolicy::kLru);
  cache.Use({1});
  ASSERT_TRUE(cache->Pin({0, 1}).ok());
  ASSERT_TRUE(cache->Pin({0, 1}).ok());
  cache.Use({2, 3, 4});
  EXPECT_TRUE(cache.Holds(1));
  ASSERT_TRUE(cache->Unpin({0, 1}).ok());
  cache.Use({2, 3});
  EXPECT_TRUE(cache.Holds(1));
  ASSERT_TRUE(cache->Unpin({0, 1}).ok());
  cache.Use({2, 3});
  EXPECT_FALSE(cache.Holds(1));
  EXPECT_EQ(Message(cache->Unpin({0, 1}), Code::kInvalidArgument),
            "expert cache: layer 0, expert 1: is not pinned");
  EXPECT_EQ(Message(cache->Pin({0, 9}), Code::kInvalidArgument),
            "expert cache: layer 0, expert 9: is not there to be pinned");
}

TEST(ExpertCache, DoesNotKeepWhatFailsToLoad) {
  ExpertCache cache({1000});
  const auto fail = [](const ExpertKey&) -> Result<Expert> { return Status(Code::kIo, "no disk"); };
  EXPECT_EQ(Message(cache.Get({0, 1}, 10, fail).status(), Code::kIo), "no disk");
  EXPECT_EQ(cache.statistics().entries, 0);
  EXPECT_EQ(cache.statistics().bytes, 0);
  EXPECT_TRUE(cache.Get({0, 1}, 10, Nothing).ok());
}

TEST(ExpertCache, HoldsPreparedExperts) {
  const Device device = *Device::Open("cpu", {.threads = 1});
  const std::vector<float> values(64 * 32, 0.5F);
  const auto weights = Quantize({values.data(), DType::kF32, {64, 32}}, {});
  Expert expert;
  expert.gate.weights = *Prepare(*weights, device);
  const int64_t bytes = expert.gate.weights.bytes();
  const auto load = [&](const ExpertKey&) -> Result<Expert> { return expert; };
  ExpertCache cache({bytes});
  const Result<ExpertLease> lease = cache.Get({0, 0}, bytes, load);
  ASSERT_TRUE(lease.ok());
  EXPECT_EQ(Internals::Storage(lease->expert().gate.weights),
            Internals::Storage(expert.gate.weights));
  ExpertCache small({bytes});
  EXPECT_EQ(Message(small.Get({0, 0}, bytes - 1, load).status(), Code::kInvalidArgument),
            "expert cache: layer 0, expert 0: " + std::to_string(bytes) +
                " bytes of weights, expected at most " + std::to_string(bytes - 1));
}

TEST(ExpertCache, LeasesMayOutliveIt) {
  Result<ExpertLease> lease = ExpertCache({1000}).Get({0, 1}, 10, Nothing);
  ASSERT_TRUE(lease.ok());
  EXPECT_EQ(lease->expert().gate.index, 0);
}

TEST(ExpertCache, LoadsOnceForAllThreads) {
  constexpr int64_t kThreads = 8;
  constexpr int64_t kExperts = 12;
  ExpertCache cache({kThreads * kBytes, CachePolicy::kFrequency});
  std::atomic<int> loads{0};
  std::atomic<int> loading{0};
  std::atomic<bool> over{false};
  const auto load = [&](const ExpertKey& key) -> Result<Expert> {
    ++loads;
    if (++loading > kThreads) over = true;
    std::this_thread::yield();
    --loading;
    Expert expert;
    expert.gate.index = key.expert;
    return expert;
  };
  std::vector<std::thread> threads;
  for (int64_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int64_t i = 0; i < 500; ++i) {
        const int64_t expert = (i * (thread + 1)) % kExperts;
        const Result<ExpertLease> lease = cache.Get({1, expert}, kBytes, load);
        if (!lease.ok() || lease->expert().gate.index != expert) over = true;
        if (cache.statistics().bytes > kThreads * kBytes) over = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_FALSE(over);
  const ExpertCacheStatistics statistics = cache.statistics();
  EXPECT_EQ(statistics.hits + statistics.misses, 500 * kThreads);
  EXPECT_EQ(statistics.misses, loads);
  EXPECT_EQ(statistics.misses - statistics.evictions, statistics.entries);
}

}  // namespace
}  // namespace marlin::expert_cache_test
