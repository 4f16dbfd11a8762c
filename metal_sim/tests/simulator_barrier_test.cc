// Barriers and collectives: the threads that must reach them, the findings where some do not, and
// that no launch hangs.
#include "simulator_fixture.h"

namespace metal_sim::simulator_barrier_test {
namespace {

class BarrierTest : public SimulatorTest {};

TEST_F(BarrierTest, ReturningBeforeABarrierIsDivergent) {
  const Report report = Run([] {
    if (ThreadIndex() >= 60) return;
    Sim().threadgroup_barrier(kThreadgroup, Site(1));
    Store(Buffer<uint32_t>(0) + ThreadIndex(), 1U, 2);
  });
  ASSERT_EQ(report.findings.size(), 1U) << Text(report);
  EXPECT_EQ(report.findings[0].kind, FindingKind::kDivergentBarrier);
  EXPECT_EQ(report.findings[0].site, Site(1));
  EXPECT_EQ(report.findings[0].text,
            "threadgroup_barrier: 4 of 64 threads have returned, thread 0 of threadgroup (0,0,0) "
            "waits there; this hangs or has no meaning on a GPU");
  EXPECT_EQ(words_[59], 1U);
}

TEST_F(BarrierTest, ReturningAfterTheLastBarrierIsNot) {
  EXPECT_TRUE(Run([] {
                Sim().threadgroup_barrier(kThreadgroup, Site(1));
                if (ThreadIndex() % 2 == 0) return;
                SimdSum(1, 2);
              }).clean());
}

TEST_F(BarrierTest, DifferentBarriersDoNotMeet) {
  const Report report =
      Run([] { Sim().threadgroup_barrier(kThreadgroup, Site(ThreadIndex() < 32 ? 1 : 2)); });
  ASSERT_EQ(report.findings.size(), 1U) << Text(report);
  EXPECT_EQ(report.findings[0].kind, FindingKind::kDivergentBarrier);
  EXPECT_EQ(report.findings[0].site, Site(1));
  EXPECT_EQ(report.findings[0].other_site, Site(2));
  EXPECT_EQ(report.findings[0].count, 32U);
}

TEST_F(BarrierTest, ASimdgroupBarrierWantsAllLanes) {
  const Report returned = Run([] {
    if (ThreadIndex() % 32 < 3) return;
    Sim().simdgroup_barrier(kThreadgroup, Site(1));
  });
  ASSERT_EQ(returned.findings.size(), 1U) << Text(returned);
  EXPECT_EQ(returned.findings[0].kind, FindingKind::kDivergentBarrier);
  EXPECT_EQ(returned.findings[0].count, 2U);
  EXPECT_NE(returned.findings[0].text.find("29 of 32 lanes"), std::string::npos);
  const Report different =
      Run([] { Sim().simdgroup_barrier(kThreadgroup, Site(1 + ThreadIndex() % 2)); });
  ASSERT_EQ(different.findings.size(), 1U) << Text(different);
  EXPECT_EQ(different.findings[0].other_site, Site(2));
}

TEST_F(BarrierTest, SimdgroupsWaitSeparately) {
  const Report report = Run([] {
    for (uint32_t i = 0; i < 3 + ThreadIndex() / 32; ++i) {
      Sim().simdgroup_barrier(kThreadgroup, Site(1));
    }
  });
  EXPECT_TRUE(report.clean()) << Text(report);
  EXPECT_EQ(report.counters.simdgroup_barriers, 7);
}

TEST_F(BarrierTest, BarriersThatWaitForEachOtherAreADeadlock) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    options_.seed = seed;
    const Report report = Run([] {
      if (ThreadIndex() < 5) {
        Sim().simdgroup_barrier(kThreadgroup, Site(1));
      } else {
        Sim().threadgroup_barrier(kThreadgroup, Site(2));
      }
      ADD_FAILURE() << "a thread passed";
    });
    ASSERT_EQ(report.findings.size(), 1U) << Text(report);
    EXPECT_EQ(report.findings[0].kind, FindingKind::kDeadlock);
    EXPECT_EQ(report.findings[0].site, Site(1));
    EXPECT_EQ(report.findings[0].other_site, Site(2));
  }
}

TEST_F(BarrierTest, WaitingForAThreadgroupThatIsNotResidentEndsTheLaunch) {
  launch_.grid = {5, 1, 1};
  options_.step_limit = 10'000;
  const Report report = Run([] {
    uint32_t* out = Buffer<uint32_t>(0);
    if (GroupIndex() == 4) AtomicAdd(out, 1U, 1);
    while (AtomicLoad(out, 2) == 0) continue;
  });
  ASSERT_EQ(report.findings.size(), 1U) << Text(report);
  EXPECT_EQ(report.findings[0].kind, FindingKind::kDeadlock);
  EXPECT_EQ(report.findings[0].site, Site(2));
  EXPECT_NE(report.findings[0].text.find("4 of 5 threadgroups had begun"), std::string::npos);
}

TEST_F(BarrierTest, WaitingForAResidentThreadgroupIsServed) {
  launch_.grid = {4, 1, 1};
  for (uint64_t seed = 0; seed < 4; ++seed) {
    options_.seed = seed;
    words_[0] = 0;
    EXPECT_TRUE(Run([] {
                  uint32_t* out = Buffer<uint32_t>(0);
                  if (GroupIndex() == 3) AtomicStore(out, 1U, 1);
                  while (AtomicLoad(out, 2) == 0) continue;
                }).clean());
  }
}

TEST_F(BarrierTest, AnEndlessLoopOfPlainLoadsEnds) {
  options_.step_limit = 1000;
  for (const double preemption : {0.0, 0.5}) {
    options_.seed = preemption > 0 ? 1 : 0;
    options_.preemption = preemption;
    const Report report = Run([] {
      while (Load(Buffer<uint32_t>(0), 1) == 0) continue;
    });
    ASSERT_EQ(report.findings.size(), 1U) << Text(report);
    EXPECT_EQ(report.findings[0].kind, FindingKind::kDeadlock);
  }
}

TEST_F(BarrierTest, PreemptionDoesNotUseTheStepLimitUp) {
  options_.step_limit = 100;
  options_.seed = 1;
  options_.preemption = 1;
  EXPECT_TRUE(Run([] {
                for (int i = 0; i < 1000; ++i) Load(Buffer<uint32_t>(0), 1);
              }).clean());
}

TEST_F(BarrierTest, ProgressStartsTheStepLimitAnew) {
  options_.step_limit = 1000;
  const auto add = [] {
    for (int i = 0; i < 10; ++i) AtomicAdd(Buffer<uint32_t>(0), 1U, 1);
  };
  EXPECT_TRUE(Run([add] {
                for (int i = 0; i < 4; ++i) {
                  add();
                  Sim().threadgroup_barrier(kThreadgroup, Site(2));
                }
              }).clean());
  launch_.grid = {8, 1, 1};
  options_.resident_threadgroups = 1;
  EXPECT_TRUE(Run(add).clean());
}

TEST_F(BarrierTest, CollectivesGetTheLanesThatCome) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    options_.seed = seed;
    const Report report = Run([] {
      const uint32_t thread = ThreadIndex();
      uint32_t sum = SimdSum(thread, 1, true);
      if (thread % 32 < 10) sum += SimdSum(1, 2);
      Sim().threadgroup_barrier(kThreadgroup, Site(3));
      Store(Buffer<uint32_t>(0) + thread, sum, 4);
    });
    EXPECT_TRUE(report.clean()) << Text(report);
    EXPECT_EQ(report.counters.simdgroup_operations, 4);
    EXPECT_EQ(words_[0], 496U + 10);
    EXPECT_EQ(words_[10], 496U);
    EXPECT_EQ(words_[41], 496U + 1024 + 10);
  }
}

TEST_F(BarrierTest, ActiveLanesMayCollectAfterOthersReturned) {
  const Report report = Run([] {
    if (ThreadIndex() % 32 >= 8) return;
    Store(Buffer<uint32_t>(0) + ThreadIndex(), SimdSum(1, 1), 2);
  });
  EXPECT_TRUE(report.clean()) << Text(report);
  EXPECT_EQ(words_[0], 8U);
}

TEST_F(BarrierTest, AWholeCollectiveWantsAllLanes) {
  const Report partial = Run([] {
    if (ThreadIndex() % 32 < 31) SimdSum(1, 1, true);
  });
  ASSERT_EQ(partial.findings.size(), 1U) << Text(partial);
  EXPECT_EQ(partial.findings[0].kind, FindingKind::kDivergentCollective);
  EXPECT_EQ(partial.findings[0].text,
            "simd_sum: 31 of 32 lanes came, and it needs all; thread 0 of threadgroup (0,0,0) is "
            "one");
  launch_.threads_per_threadgroup = {48, 1, 1};
  EXPECT_EQ(Of(Run([] { SimdSum(1, 1, true); }), FindingKind::kDivergentCollective).size(), 1U);
}

// Lanes in opposite branches are not active in each other's, and meet after them.
TEST_F(BarrierTest, LanesOfBranchesCollectApart) {
  const Report report = Run([] {
    const uint32_t thread = ThreadIndex();
    uint32_t sum = thread % 32 < 30 ? 0 : SimdSum(1, 1);
    sum += SimdSum(1, thread % 32 < 4 ? 2 : 3);
    Store(Buffer<uint32_t>(0) + thread, sum + SimdSum(100, 5, true), 4);
  });
  EXPECT_TRUE(report.clean()) << Text(report);
  EXPECT_EQ(words_[0], 3204U);
  EXPECT_EQ(words_[4], 3228U);
  EXPECT_EQ(words_[31], 3230U);
}

TEST_F(BarrierTest, ABarrierWaitsForCollectives) {
  const Report report = Run([] {
    if (ThreadIndex() % 32 >= 4) SimdSum(1, 1);
    Sim().simdgroup_barrier(kThreadgroup, Site(2));
  });
  EXPECT_TRUE(report.clean()) << Text(report);
}

TEST_F(BarrierTest, ACollectiveAndABarrierDoNotMeet) {
  const Report report = Run([] {
    if (ThreadIndex() < 4) {
      SimdSum(1, 1);
    } else {
      Sim().simdgroup_barrier(kThreadgroup, Site(2));
    }
  });
  EXPECT_EQ(Of(report, FindingKind::kDivergentBarrier).size(), 1U) << Text(report);
}

TEST_F(BarrierTest, AccessesOfCollectivesAreChecked) {
  const Report report = Run([] {
    uint32_t value = 1;
    const Collective add = [](void* const* data, uint32_t, void*) {
      const uint32_t sum = Load(static_cast<uint32_t*>(data[0]), 2) + 1;
      Store(Buffer<uint32_t>(0), sum, 3);
      Store(Buffer<uint32_t>(0) + (size_t{20} << 20), sum, 4);
      ADD_FAILURE() << "the launch goes on";
    };
    Sim().collective(&value, add, nullptr, "store", true, Site(1));
  });
  ASSERT_EQ(report.findings.size(), 1U) << Text(report);
  EXPECT_EQ(report.findings[0].kind, FindingKind::kOutOfBounds);
  EXPECT_EQ(report.findings[0].site, Site(4));
  EXPECT_EQ(words_[0], 2U);
}

}  // namespace
}  // namespace metal_sim::simulator_barrier_test
