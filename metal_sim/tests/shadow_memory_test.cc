// Shadow memory that keeps one cell for bytes accessed together, against one that is only ever
// asked byte by byte; and the reuse of the memory of one launch by the next.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

#include "metal_sim/random_source.h"
#include "metal_sim/shadow_cell.h"
#include "simulator_fixture.h"

namespace metal_sim::shadow_memory_test {
namespace {

constexpr size_t kBytes = 64;

ShadowMemory Allocated() {
  auto shadow = ShadowMemory::Allocate(kBytes);
  EXPECT_TRUE(shadow.ok());
  return std::move(*shadow);
}

/// The access asked byte by byte: the first race, or the first objection.
Conflict CheckBytes(ShadowMemory* shadow, size_t offset, size_t bytes, const CurrentAccess& now,
                    AccessUse use, const AccessOrder& order) {
  Conflict first;
  for (size_t byte = 0; byte < bytes; ++byte) {
    Conflict conflict = shadow->Check(offset + byte, 1, now, use, order);
    conflict.byte = byte;
    const bool better =
        first.what == Conflict::What::kNone ||
        (first.what == Conflict::What::kUninitialised && conflict.what == Conflict::What::kRace);
    if (conflict.what != Conflict::What::kNone && better) first = conflict;
  }
  return first;
}

bool SameRecord(const AccessRecord& a, const AccessRecord& b) {
  return a.group_epoch == b.group_epoch && a.simd_epoch == b.simd_epoch && a.site == b.site &&
         a.thread == b.thread && a.atomic == b.atomic;
}

/// A random access of one of 3 threads in each of 2 simdgroups; now and then a barrier.
struct RandomAccess {
  size_t offset = 0;
  size_t bytes = 1;
  CurrentAccess now;
  AccessUse use;

  void Draw(RandomSource* random, AccessOrder* order) {
    if (random->Below(12) == 0) now.record.group_epoch = order->epochs.NextOfThreadgroup();
    if (random->Below(12) == 0) ++now.record.simd_epoch;
    bytes = size_t{1} << random->Below(5);
    offset = random->Below(static_cast<uint32_t>(kBytes / bytes)) * bytes;
    if (random->Below(8) == 0) offset = random->Below(static_cast<uint32_t>(kBytes - bytes + 1));
    now.record.thread = (random->Below(3) + 32 * random->Below(2)) & 1023U;
    now.record.site = 1 + random->Below(1000);
    now.record.atomic = random->Below(5) == 0 ? 1 : 0;
    use.writes = random->Below(3) == 0;
    use.reads = !use.writes || now.record.atomic != 0;
  }
};

TEST(ShadowMemory, FindsWhatItFindsByteByByte) {
  int races = 0;
  int uninitialised = 0;
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    RandomSource random(seed);
    AccessOrder order;
    ShadowMemory together = Allocated();
    ShadowMemory apart = Allocated();
    RandomAccess access;
    access.now.kind = MemoryKind::kThreadgroup;
    access.now.record.group_epoch = order.epochs.NextOfThreadgroup();
    for (int i = 0; i < 100; ++i) {
      // As for the next threadgroup: nothing from before counts.
      if (i == 60) {
        access.now.first_epoch = access.now.record.group_epoch = order.epochs.NextOfThreadgroup();
      }
      access.Draw(&random, &order);
      const Conflict found =
          together.Check(access.offset, access.bytes, access.now, access.use, order);
      const Conflict expected =
          CheckBytes(&apart, access.offset, access.bytes, access.now, access.use, order);
      ASSERT_EQ(found.what, expected.what) << "seed " << seed << ", access " << i;
      races += found.what == Conflict::What::kRace ? 1 : 0;
      uninitialised += found.what == Conflict::What::kUninitialised ? 1 : 0;
      if (found.what == Conflict::What::kNone) continue;
      ASSERT_EQ(found.byte, expected.byte) << "seed " << seed << ", access " << i;
      ASSERT_TRUE(SameRecord(found.other, expected.other)) << "seed " << seed << ", access " << i;
      ASSERT_EQ(found.other_wrote, expected.other_wrote) << "seed " << seed << ", access " << i;
    }
  }
  EXPECT_GT(races, 1000);
  EXPECT_GT(uninitialised, 1000);
}

class NextLaunchTest : public SimulatorTest {};

TEST_F(NextLaunchTest, KnowsNothingOfTheOneBefore) {
  const auto write = [] {
    Store(Tile<uint32_t>(64) + ThreadIndex(), 1U, 1);
    Store(Buffer<uint32_t>(0) + ThreadIndex(), 1U, 2);
  };
  const auto read_neighbours = [] {
    const uint32_t other = ThreadIndex() ^ 1;
    Load(Tile<uint32_t>(64) + other, 3);
    Load(Buffer<uint32_t>(0) + other, 4);
  };
  launch_.buffers[0].initialised = false;
  EXPECT_TRUE(Run(write).clean());
  const Report report = Run(read_neighbours);
  EXPECT_EQ(Of(report, FindingKind::kUninitialisedRead).size(), 2U) << Text(report);
  EXPECT_TRUE(Of(report, FindingKind::kRace).empty()) << Text(report);
}

TEST_F(NextLaunchTest, SeesZerosBesideASmallerBuffer) {
  EXPECT_TRUE(Run([] { Store(Buffer<uint32_t>(0) + 128 + ThreadIndex(), 7U, 1); }).clean());
  words_.resize(64);
  const Report report = Run([] {
    if (ThreadIndex() != 0) return;
    Store(Buffer<uint32_t>(0), 1 + Load(Buffer<uint32_t>(0) + 128, 2), 3);
  });
  EXPECT_EQ(Of(report, FindingKind::kOutOfBounds).size(), 1U) << Text(report);
  EXPECT_EQ(words_[0], 1U);
}

TEST_F(NextLaunchTest, MayHoldMoreAndLargerBuffersAndMoreThreads) {
  for (const uint32_t words : {64U, 4096U, 100U, 1U << 20, 64U}) {
    words_.assign(words, 0);
    std::vector<uint32_t> more(words, 2);
    launch_.buffers[1] = {more.data(), int64_t{words} * 4, words != 100, true, "more"};
    launch_.grid.x = words / 64;
    EXPECT_TRUE(Run([] {
                  const uint32_t i = GroupIndex() * 64 + ThreadIndex();
                  Store(Buffer<uint32_t>(0) + i, Load(Buffer<uint32_t>(1) + i, 1), 2);
                }).clean());
    EXPECT_EQ(std::count(words_.begin(), words_.end(), 2U), words / 64 * 64);
  }
}

}  // namespace
}  // namespace metal_sim::shadow_memory_test
