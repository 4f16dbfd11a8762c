// Leases of the split-K scratch memory.
#include "backends/cuda/plan/scratch_leases.h"

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace marlin::cuda::scratch_leases_test {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

std::unique_ptr<ScratchLeases> Make(int64_t bytes = 32 * kMiB) {
  return std::make_unique<ScratchLeases>(bytes);
}

TEST(ScratchLeases, GiveAKeyTheSamePartAgain) {
  const auto leases = Make();
  EXPECT_EQ(leases->Find(1, 256), ScratchLeases::kNone);
  const int64_t one = leases->Lend(1, 1000, false);
  const int64_t two = leases->Lend(2, 1000, false);
  EXPECT_NE(one, two);
  EXPECT_EQ(leases->Find(1, 1000), one);
  EXPECT_EQ(leases->Lend(1, 10, false), one);
  EXPECT_EQ(leases->Find(1, 1025), ScratchLeases::kNone) << "it has 1024 bytes";
  const int64_t more = leases->Lend(1, 1025, false);
  EXPECT_NE(more, one);
  EXPECT_EQ(leases->Find(1, 1000), more);
}

// A process that runs 10,000 shapes, each with a workspace of its own, still uses a few streams.
TEST(ScratchLeases, SufficeForAnyNumberOfShapesOnAFewStreams) {
  const auto leases = Make();
  std::mt19937 random(3);
  for (int i = 0; i < 10000; ++i) {
    const uint64_t stream = 1 + random() % 8;
    const auto bytes = static_cast<int64_t>(1 + random() % (2 * kMiB));
    ASSERT_NE(leases->Lend(stream, bytes, false), ScratchLeases::kNone) << i;
  }
}

TEST(ScratchLeases, NeverOverlap) {
  const auto leases = Make(kMiB);
  std::mt19937 random(4);
  std::map<int64_t, int64_t> lent;  // Begin -> end.
  for (uint64_t key = 1; key < 500; ++key) {
    const auto bytes = static_cast<int64_t>(1 + random() % 5000);
    const int64_t offset = leases->Lend(key, bytes, random() % 2 == 0);
    if (offset == ScratchLeases::kNone) continue;
    EXPECT_EQ(offset % ScratchLeases::kAlignment, 0);
    EXPECT_LE(offset + bytes, kMiB);
    const auto after = lent.lower_bound(offset);
    const int64_t next = after == lent.end() ? kMiB : after->first;
    const int64_t end_before = after == lent.begin() ? 0 : std::prev(after)->second;
    EXPECT_LE(offset + bytes, next);
    EXPECT_LE(end_before, offset);
    lent[offset] = offset + bytes;
  }
  EXPECT_GT(lent.size(), 50U);
}

TEST(ScratchLeases, AreTakenBackUnlessForGood) {
  const auto leases = Make(4096);
  const int64_t kept = leases->Lend(1, 1024, true);
  EXPECT_NE(leases->Lend(2, 2048, false), ScratchLeases::kNone);
  EXPECT_EQ(leases->Lend(3, 2048, false), ScratchLeases::kNone);
  leases->TakeBack();
  EXPECT_EQ(leases->Find(1, 1024), kept);
  EXPECT_EQ(leases->Find(2, 256), ScratchLeases::kNone);
  EXPECT_NE(leases->Lend(3, 2048, false), ScratchLeases::kNone);
  EXPECT_EQ(leases->Lend(4, 2048, true), ScratchLeases::kNone);
}

TEST(ScratchLeases, RefuseWhatIsTooMuch) {
  const auto leases = Make(4096);
  EXPECT_EQ(leases->Lend(1, 4097, false), ScratchLeases::kNone);
  EXPECT_EQ(leases->Lend(1, INT64_MAX, false), ScratchLeases::kNone);
  EXPECT_EQ(leases->Lend(1, 4096, false), 0);
  // More keys than there are slots.
  const auto many = Make(int64_t{1} << 30);
  int refused = 0;
  for (uint64_t key = 1; key <= 2000; ++key) {
    if (many->Lend(key, 1, false) == ScratchLeases::kNone) ++refused;
  }
  EXPECT_EQ(refused, 2000 - 1024);
  many->TakeBack();
  EXPECT_NE(many->Lend(2000, 1, false), ScratchLeases::kNone);
}

TEST(ScratchLeases, ServeThreadsAtOnce) {
  const auto leases = Make();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (uint64_t key = 1; key <= 4; ++key) {
    threads.emplace_back([&, key] {
      int64_t last = ScratchLeases::kNone;
      for (int64_t bytes = 256; bytes <= kMiB; bytes += 256) {
        int64_t offset = leases->Find(key, bytes);
        if (offset == ScratchLeases::kNone) offset = leases->Lend(key, bytes, false);
        if (offset == ScratchLeases::kNone) ++wrong;
        if ((bytes & (bytes - 1)) == 0 && offset == last) ++wrong;
        last = (bytes & (bytes - 1)) == 0 ? offset : last;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace marlin::cuda::scratch_leases_test
