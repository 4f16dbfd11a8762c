// Races: found with every schedule, between the right sites, and only where nothing orders.
#include "simulator_fixture.h"

namespace metal_sim::simulator_race_test {
namespace {

constexpr uint32_t kTile = 64;
constexpr uintptr_t kFill = 1;
constexpr uintptr_t kUse = 2;

/// Which of the two barriers of a step are there: after filling the next stage, after using it.
struct Barriers {
  bool after_fill = true;
  bool after_use = true;
};

/// One stage of 64 words, filled and read by different threads, several times over.
void StagedSum(const Barriers& barriers, uint32_t flags) {
  uint32_t* tile = Tile<uint32_t>(kTile);
  const uint32_t thread = ThreadIndex();
  uint32_t sum = 0;
  for (uint32_t step = 0; step < 4; ++step) {
    Store(&tile[thread], thread + step, kFill);
    if (barriers.after_fill) Sim().threadgroup_barrier(flags, Site(10));
    sum += Load(&tile[(thread + 33) % kTile], kUse);
    if (barriers.after_use) Sim().threadgroup_barrier(flags, Site(11));
  }
  Store(Buffer<uint32_t>(0) + thread, sum, 3);
}

/// Two stages, so that one barrier per step is enough.
void DoubleBufferedSum(bool with_barrier) {
  uint32_t* tile = Tile<uint32_t>(2 * kTile);
  const uint32_t thread = ThreadIndex();
  uint32_t sum = 0;
  for (uint32_t step = 0; step < 6; ++step) {
    uint32_t* stage = tile + step % 2 * kTile;
    Store(&stage[thread], thread + step, kFill);
    if (with_barrier) Sim().threadgroup_barrier(kThreadgroup, Site(10));
    sum += Load(&stage[(thread + 1) % kTile], kUse);
  }
  Store(Buffer<uint32_t>(0) + thread, sum, 3);
}

class RaceTest : public SimulatorTest {
 protected:
  /// Runs in turn, and in ten random orders with and without preemption.
  void ForEverySchedule(const std::function<void()>& body,
                        const std::function<void(const Report&)>& check) {
    for (uint64_t seed = 0; seed <= 10; ++seed) {
      SCOPED_TRACE(seed);
      options_.seed = seed;
      options_.preemption = seed % 2 == 0 ? 0.3 : 0;
      check(Run(body));
    }
  }
};

TEST_F(RaceTest, TwoBarriersPerStepOfOneStageAreClean) {
  ForEverySchedule([] { StagedSum({}, kThreadgroup); },
                   [this](const Report& report) {
                     EXPECT_TRUE(report.clean()) << Text(report);
                     EXPECT_EQ(report.counters.threadgroup_barriers, 8);
                     EXPECT_EQ(words_[0], 4 * 33 + 6U);
                   });
}

TEST_F(RaceTest, OneBarrierPerStepOfTwoStagesIsClean) {
  ForEverySchedule([] { DoubleBufferedSum(true); },
                   [this](const Report& report) {
                     EXPECT_TRUE(report.clean()) << Text(report);
                     EXPECT_EQ(words_[63], 15U);
                   });
}

TEST_F(RaceTest, ADroppedBarrierIsFoundWithEverySchedule) {
  for (const Barriers barriers : {Barriers{false, true}, Barriers{true, false}}) {
    SCOPED_TRACE(barriers.after_fill ? "after use" : "after fill");
    ForEverySchedule(
        [barriers] { StagedSum(barriers, kThreadgroup); },
        [](const Report& report) { EXPECT_TRUE(HasRace(report, kFill, kUse)) << Text(report); });
  }
  ForEverySchedule(
      [] { DoubleBufferedSum(false); },
      [](const Report& report) { EXPECT_TRUE(HasRace(report, kFill, kUse)) << Text(report); });
}

TEST_F(RaceTest, TheTextNamesVariableByteAndThreads) {
  const Report report = Run([] {
    uint32_t* tile = Tile<uint32_t>(kTile);
    if (ThreadIndex() == 5) Store(&tile[12], 1U, kFill);
    if (ThreadIndex() == 37) Load(&tile[12], kUse);
  });
  ASSERT_EQ(report.findings.size(), 1U) << Text(report);
  EXPECT_EQ(report.findings[0].text,
            "tile, byte 48 of 256 (threadgroup memory): written by thread 5 of threadgroup "
            "(0,0,0), then read by thread 37 of threadgroup (0,0,0); no barrier for this memory "
            "between them");
}

TEST_F(RaceTest, BarriersThatDoNotNameTheMemoryOrderNothing) {
  for (const uint32_t flags : {uint32_t{kNone}, uint32_t{kDevice}}) {
    ForEverySchedule(
        [flags] { StagedSum({}, flags); },
        [](const Report& report) { EXPECT_TRUE(HasRace(report, kFill, kUse)) << Text(report); });
  }
}

void ExchangeThroughDevice(uint32_t flags) {
  uint32_t* out = Buffer<uint32_t>(0);
  Store(&out[ThreadIndex()], 1U, kFill);
  Sim().threadgroup_barrier(flags, Site(10));
  Load(&out[63 - ThreadIndex()], kUse);
}

TEST_F(RaceTest, DeviceMemoryIsOrderedByItsOwnFlag) {
  EXPECT_TRUE(Run([] { ExchangeThroughDevice(kDevice); }).clean());
  EXPECT_TRUE(Run([] { ExchangeThroughDevice(kDevice | kThreadgroup); }).clean());
  EXPECT_TRUE(HasRace(Run([] { ExchangeThroughDevice(kThreadgroup); }), kFill, kUse));
}

void ExchangeInSimdgroup(uint32_t distance, bool barrier) {
  uint32_t* tile = Tile<uint32_t>(kTile);
  const uint32_t thread = ThreadIndex();
  Store(&tile[thread], 1U, kFill);
  if (barrier) Sim().simdgroup_barrier(kThreadgroup, Site(10));
  Load(&tile[thread ^ distance], kUse);
}

TEST_F(RaceTest, SimdgroupBarriersOrderTheirSimdgroupOnly) {
  ForEverySchedule([] { ExchangeInSimdgroup(1, true); },
                   [](const Report& report) { EXPECT_TRUE(report.clean()) << Text(report); });
  ForEverySchedule([] { ExchangeInSimdgroup(32, true); },
                   [](const Report& report) { EXPECT_TRUE(HasRace(report, kFill, kUse)); });
}

TEST_F(RaceTest, LanesAreNotInLockstep) {
  ForEverySchedule([] { ExchangeInSimdgroup(1, false); },
                   [](const Report& report) { EXPECT_TRUE(HasRace(report, kFill, kUse)); });
}

TEST_F(RaceTest, CollectivesOrderNothing) {
  ForEverySchedule(
      [] {
        uint32_t* tile = Tile<uint32_t>(kTile);
        Store(&tile[ThreadIndex()], 1U, kFill);
        SimdSum(1, 10, true);
        Load(&tile[ThreadIndex() ^ 1], kUse);
      },
      [](const Report& report) { EXPECT_TRUE(HasRace(report, kFill, kUse)); });
}

TEST_F(RaceTest, AWriteIsComparedWithAllReadersSinceTheLastOne) {
  // Readers of both simdgroups, before and after a simdgroup_barrier; the writer reads as well.
  for (uint32_t writer = 0; writer < 64; ++writer) {
    ForEverySchedule(
        [writer] {
          uint32_t* tile = Tile<uint32_t>(1);
          if (ThreadIndex() == 0) Store(tile, 1U, kFill);
          Sim().threadgroup_barrier(kThreadgroup, Site(10));
          const uint32_t reader = (writer + 40) % 64;
          if (ThreadIndex() == reader || ThreadIndex() == writer) Load(tile, kUse);
          Sim().simdgroup_barrier(kThreadgroup, Site(11));
          if (ThreadIndex() == writer) Store(tile, 2U, 4);
        },
        [writer](const Report& report) {
          const bool same_simdgroup = (writer + 40) % 64 / 32 == writer / 32;
          EXPECT_EQ(HasRace(report, 4, kUse), !same_simdgroup) << writer << Text(report);
        });
  }
}

TEST_F(RaceTest, AReaderOfAnotherSimdgroupIsNotForgotten) {
  const Report report = Run([] {
    uint32_t* out = Buffer<uint32_t>(0);
    const uint32_t thread = ThreadIndex();
    if (thread == 0 || thread == 1) Load(out, kUse);
    if (thread == 40) Load(out, 5);
    Sim().simdgroup_barrier(kDevice, Site(10));
    if (thread == 0) Store(out, 1U, kFill);
  });
  EXPECT_TRUE(HasRace(report, kFill, 5)) << Text(report);
  EXPECT_FALSE(HasRace(report, kFill, kUse)) << Text(report);
}

TEST_F(RaceTest, SameValuesRaceToo) {
  EXPECT_TRUE(HasRace(Run([] { Store(Buffer<uint32_t>(0), 7U, kFill); }), kFill, kFill));
}

TEST_F(RaceTest, NeighbouringBytesDoNotRace) {
  const Report report = Run([] {
    auto* bytes = Buffer<uint8_t>(0);
    Store(&bytes[ThreadIndex()], uint8_t{1}, kFill);
  });
  EXPECT_TRUE(report.clean()) << Text(report);
}

TEST_F(RaceTest, ThreadgroupsAreNotOrdered) {
  launch_.grid = {2, 1, 1};
  for (const int resident : {1, 2}) {
    options_.resident_threadgroups = resident;
    ForEverySchedule(
        [] {
          auto* bytes = Buffer<uint8_t>(0);
          if (ThreadIndex() == 0) Store(&bytes[3], uint8_t{1}, kFill);
        },
        [](const Report& report) {
          ASSERT_EQ(Of(report, FindingKind::kRace).size(), 1U);
          EXPECT_NE(report.findings[0].text.find("nothing orders threadgroups"), std::string::npos);
        });
  }
}

TEST_F(RaceTest, AtomicsDoNotRaceWithEachOther) {
  launch_.grid = {3, 1, 1};
  ForEverySchedule([] { AtomicAdd(Buffer<uint32_t>(0), 1U, kFill); },
                   [this](const Report& report) {
                     EXPECT_TRUE(report.clean()) << Text(report);
                     EXPECT_EQ(report.counters.atomics, 192);
                     EXPECT_EQ(std::exchange(words_[0], 0U), 192U);
                   });
}

TEST_F(RaceTest, AtomicsRaceWithPlainAccesses) {
  for (const bool write : {false, true}) {
    ForEverySchedule(
        [write] {
          uint32_t* out = Buffer<uint32_t>(0);
          if (ThreadIndex() != 7) {
            AtomicAdd(out, 1U, kFill);
          } else if (write) {
            Store(out, 0U, kUse);
          } else {
            Load(out, kUse);
          }
        },
        [](const Report& report) { EXPECT_TRUE(HasRace(report, kFill, kUse)); });
  }
}

TEST_F(RaceTest, AnOwnAtomicDoesNotHideAPlainAccess) {
  for (const bool write : {false, true}) {
    const Report report = Run([write] {
      uint32_t* out = Buffer<uint32_t>(0);
      if (ThreadIndex() == 0 && write) Store(out, 1U, kUse);
      if (ThreadIndex() == 0 && !write) Load(out, kUse);
      AtomicAdd(out, 1U, kFill);
    });
    EXPECT_FALSE(Of(report, FindingKind::kRace).empty());
  }
}

/// Threadgroup 0 writes and then sets a flag; threadgroup 1 reads if it sees the flag. Both have
/// one thread.
void PassMessage(int store_order, int load_order, bool fences) {
  uint32_t* out = Buffer<uint32_t>(0);
  if (GroupIndex() == 0) {
    Store(&out[0], 41U, kFill);
    if (fences) Sim().fence(kDevice, kRelease, kDeviceScope, Site(20));
    AtomicStore(&out[1], 1U, 21, store_order);
    Store(&out[2], 42U, 5);
    return;
  }
  while (AtomicLoad(&out[1], 22, load_order) == 0) continue;
  if (fences) Sim().fence(kDevice, kAcquire, kDeviceScope, Site(23));
  Load(&out[0], kUse);
  Load(&out[2], 6);
}

class MessageTest : public RaceTest {
 protected:
  MessageTest() {
    launch_.grid = {2, 1, 1};
    launch_.threads_per_threadgroup = {1, 1, 1};
    options_.msl_version = 410;
  }
  Report Pass(int store_order, int load_order, bool fences) {
    words_[1] = 0;
    return Run([=] { PassMessage(store_order, load_order, fences); });
  }
};

TEST_F(MessageTest, ReleaseAndAcquireOrder) {
  const Report report = Pass(kRelease, kAcquire, false);
  EXPECT_FALSE(HasRace(report, kFill, kUse)) << Text(report);
  // Writes after the release are not released.
  EXPECT_TRUE(HasRace(report, 5, 6)) << Text(report);
}

TEST_F(MessageTest, FencesAroundRelaxedAtomicsOrder) {
  options_.msl_version = 320;
  const Report report = Pass(kRelaxed, kRelaxed, true);
  EXPECT_FALSE(HasRace(report, kFill, kUse)) << Text(report);
  EXPECT_TRUE(HasRace(report, 5, 6)) << Text(report);
}

TEST_F(MessageTest, HalfAnOrderIsNone) {
  EXPECT_TRUE(HasRace(Pass(kRelaxed, kRelaxed, false), kFill, kUse));
  EXPECT_TRUE(HasRace(Pass(kRelease, kRelaxed, false), kFill, kUse));
  EXPECT_TRUE(HasRace(Pass(kRelaxed, kAcquire, false), kFill, kUse));
}

TEST_F(MessageTest, OrdersNeedTheirLanguageVersion) {
  options_.msl_version = 400;
  const Report atomics = Pass(kRelease, kAcquire, false);
  EXPECT_EQ(Of(atomics, FindingKind::kUnsupportedOrder).size(), 2U) << Text(atomics);
  EXPECT_TRUE(HasRace(atomics, kFill, kUse));
  options_.msl_version = 310;
  const Report fences = Pass(kRelaxed, kRelaxed, true);
  EXPECT_EQ(Of(fences, FindingKind::kUnsupportedOrder).size(), 2U) << Text(fences);
  EXPECT_TRUE(HasRace(fences, kFill, kUse));
}

TEST_F(MessageTest, AFenceReachesItsScopeOnly) {
  options_.msl_version = 320;
  launch_.threads_per_threadgroup = {1, 1, 1};
  const Report report = Run([] {
    uint32_t* out = Buffer<uint32_t>(0);
    if (GroupIndex() == 0) {
      Store(&out[0], 41U, kFill);
      Sim().fence(kDevice, kRelease, kThreadgroupScope, Site(20));
      AtomicStore(&out[1], 1U, 21);
      return;
    }
    while (AtomicLoad(&out[1], 22) == 0) continue;
    Sim().fence(kDevice, kAcquire, kDeviceScope, Site(23));
    Load(&out[0], kUse);
  });
  EXPECT_TRUE(HasRace(report, kFill, kUse)) << Text(report);
}

TEST_F(MessageTest, ARelaxedStoreEndsAReleaseAndAnExchangeDoesNot) {
  launch_.grid = {3, 1, 1};
  for (const bool exchange : {false, true}) {
    words_[1] = 0;
    const Report report = Run([exchange] {
      uint32_t* out = Buffer<uint32_t>(0);
      if (GroupIndex() == 0) {
        Store(&out[0], 41U, kFill);
        AtomicStore(&out[1], 1U, 21, kRelease);
      } else if (GroupIndex() == 1) {
        while (AtomicLoad(&out[1], 22) == 0) continue;
        if (exchange) AtomicAdd(&out[1], 1U, 23);
        if (!exchange) AtomicStore(&out[1], 2U, 24);
      } else {
        // An acquire that saw the 1 in passing would be in order.
        while (AtomicLoad(&out[1], 25) != 2) continue;
        AtomicLoad(&out[1], 26, kAcquire);
        Load(&out[0], kUse);
      }
    });
    EXPECT_EQ(HasRace(report, kFill, kUse), !exchange) << Text(report);
  }
}

TEST_F(MessageTest, AReleaseCoversWhatASimdgroupBarrierOrdered) {
  launch_.threads_per_threadgroup = {32, 1, 1};
  for (const bool barrier : {true, false}) {
    words_[1] = 0;
    const Report report = Run([barrier] {
      uint32_t* out = Buffer<uint32_t>(0);
      const uint32_t thread = ThreadIndex();
      if (GroupIndex() == 0) {
        Store(&out[64 + thread], thread, kFill);
        if (barrier) Sim().simdgroup_barrier(kDevice, Site(10));
        if (thread == 0) AtomicStore(&out[1], 1U, 21, kRelease);
      } else if (thread == 0) {
        while (AtomicLoad(&out[1], 22, kAcquire) == 0) continue;
        for (uint32_t i = 0; i < 32; ++i) Load(&out[64 + i], kUse);
      }
    });
    EXPECT_EQ(HasRace(report, kFill, kUse), !barrier) << Text(report);
  }
}

TEST_F(MessageTest, ReleasesInThreadgroupMemoryEndWithIt) {
  options_.resident_threadgroups = 1;
  const Report report = Run([] {
    uint32_t* flag = Tile<uint32_t>(1);
    if (GroupIndex() == 0) {
      Store(Buffer<uint32_t>(0), 41U, kFill);
      AtomicStore(flag, 1U, 21, kRelease);
    } else {
      AtomicLoad(flag, 22, kAcquire);
      Load(Buffer<uint32_t>(0), kUse);
    }
  });
  EXPECT_TRUE(HasRace(report, kFill, kUse)) << Text(report);
}

TEST_F(MessageTest, ABarrierPassesOnWhatOneThreadAcquired) {
  launch_.threads_per_threadgroup = {64, 1, 1};
  const Report report = Run([] {
    uint32_t* out = Buffer<uint32_t>(0);
    const uint32_t thread = ThreadIndex();
    if (GroupIndex() == 0) {
      Store(&out[64 + thread], thread, kFill);
      Sim().threadgroup_barrier(kDevice, Site(10));
      if (thread == 0) AtomicStore(&out[1], 1U, 21, kRelease);
      return;
    }
    if (thread == 0) {
      while (AtomicLoad(&out[1], 22, kAcquire) == 0) continue;
    }
    Sim().threadgroup_barrier(kDevice, Site(11));
    Load(&out[64 + (thread + 5) % 64], kUse);
  });
  EXPECT_TRUE(report.clean()) << Text(report);
}

}  // namespace
}  // namespace metal_sim::simulator_race_test
