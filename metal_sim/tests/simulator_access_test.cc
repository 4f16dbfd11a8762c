// Checks of accesses: bounds, initialisation, read-only buffers, memory of other threadgroups.
#include "simulator_fixture.h"

namespace metal_sim::simulator_access_test {
namespace {

class AccessTest : public SimulatorTest {
 protected:
  /// Runs with one thread and expects exactly one finding.
  Finding Only(FindingKind kind, const std::function<void()>& body) {
    launch_.threads_per_threadgroup = {1, 1, 1};
    const Report report = Run(body);
    EXPECT_EQ(report.findings.size(), 1U) << Text(report);
    if (report.findings.empty()) return {.kind = kind, .text = ""};
    EXPECT_EQ(report.findings[0].kind, kind) << Text(report);
    return report.findings[0];
  }
};

TEST_F(AccessTest, DeviceAccessesOutOfBoundsAreReportedAndGoOn) {
  struct Case {
    int64_t offset;
    const char* text;
  };
  const Case cases[] = {
      {-4,
       "out, byte -4 of 1024 (device memory): write of 4 bytes by thread 0 of threadgroup "
       "(0,0,0)"},
      {1022,
       "out, byte 1022 of 1024 (device memory): write of 4 bytes by thread 0 of threadgroup "
       "(0,0,0)"},
      {1024,
       "out, byte 1024 of 1024 (device memory): write of 4 bytes by thread 0 of threadgroup "
       "(0,0,0)"},
  };
  for (const Case& at : cases) {
    const int64_t offset = at.offset;
    words_.assign(256, 0);
    const Finding finding = Only(FindingKind::kOutOfBounds, [offset] {
      void* address = Buffer<char>(0) + offset;
      Sim().access(address, 4, true, Site(1));
      std::memset(address, 1, 4);
      Store(Buffer<uint32_t>(0) + 3, 9U, 2);
    });
    EXPECT_EQ(finding.text, at.text);
    EXPECT_EQ(finding.site, Site(1));
    EXPECT_EQ(words_[3], 9U);
  }
}

TEST_F(AccessTest, AGuardPageEndsTheLaunch) {
  for (const int64_t distance : {int64_t{-20} << 20, int64_t{20} << 20}) {
    words_.assign(256, 0);
    const Finding finding = Only(FindingKind::kOutOfBounds, [distance] {
      Store(Buffer<uint32_t>(0), 7U, 1);
      char* address = Buffer<char>(0) + distance;
      Store(address, char{1}, 2);
      Store(Buffer<uint32_t>(0) + 1, 8U, 3);
    });
    EXPECT_EQ(finding.site, Site(2));
    EXPECT_EQ(words_[0], 7U);
    EXPECT_EQ(words_[1], 0U);
  }
}

TEST_F(AccessTest, WildAddressesEndTheLaunch) {
  uint32_t outside = 5;
  for (uint32_t* address : {static_cast<uint32_t*>(nullptr), &outside}) {
    const Finding finding = Only(FindingKind::kWildAccess, [address] { Store(address, 1U, 1); });
    EXPECT_NE(finding.text.find("belongs to no buffer"), std::string::npos) << finding.text;
  }
  EXPECT_EQ(outside, 5U);
}

TEST_F(AccessTest, TheLibrarysConstantsMayBeRead) {
  static const uint32_t constants[] = {3, 4};
  launch_.program_ranges = {{&constants[0], &constants[2]}};
  EXPECT_TRUE(Run([] { Load(&constants[1], 1); }).clean());
  Only(FindingKind::kWildAccess,
       [] { Sim().access(&constants[1], sizeof(uint32_t), true, Site(1)); });
  Only(FindingKind::kWildAccess, [] { Load(&constants[1] + 1, 1); });
}

TEST_F(AccessTest, ReachedMemoryIsReadOnlyAndHasBounds) {
  static const uint32_t words[] = {3, 4, 5, 6, 7};
  launch_.reached_ranges = {{&words[3], &words[5]}, {&words[0], &words[2]}};
  launch_.threads_per_threadgroup = {2, 1, 1};
  const Report report = Run([] {
    EXPECT_EQ(Load(&words[0], 1), 3U);
    EXPECT_EQ(Load(&words[1], 1), 4U);
    EXPECT_EQ(Load(&words[4], 1), 7U);
  });
  EXPECT_TRUE(report.clean()) << Text(report);
  EXPECT_EQ(report.counters.reached_bytes_read, 2 * 3 * 4);
  Only(FindingKind::kWildAccess, [] { Load(&words[2], 1); });
  Only(FindingKind::kWildAccess, [] { Load(reinterpret_cast<const uint64_t*>(&words[4]), 1); });
  const Finding finding = Only(FindingKind::kWildAccess,
                               [] { Sim().access(&words[1], sizeof(uint32_t), true, Site(1)); });
  EXPECT_NE(finding.text.find("read-only"), std::string::npos) << finding.text;
}

TEST_F(AccessTest, AddressedMemoryIsWrittenWhereThatIsDeclared) {
  static uint32_t words[] = {3, 4, 5, 6, 7};
  launch_.threads_per_threadgroup = {1, 1, 1};
  launch_.addressed_ranges = {
      {&words[0], &words[2], false}, {&words[1], &words[3], true}, {&words[4], &words[5], true}};
  const Report report = Run([] {
    EXPECT_EQ(Load(&words[0], 1), 3U);
    Store(&words[1], 9U, 2);
    EXPECT_EQ(Load(&words[1], 1), 9U);
    Store(&words[4], 8U, 2);
  });
  EXPECT_TRUE(report.clean()) << Text(report);
  EXPECT_EQ(words[1], 9U);
  EXPECT_EQ(words[4], 8U);
  EXPECT_EQ(report.counters.addressed_bytes_read, 8);
  EXPECT_EQ(report.counters.addressed_bytes_written, 8);
  Only(FindingKind::kReadOnlyWrite,
       [] { Sim().access(&words[0], sizeof(uint32_t), true, Site(1)); });
  Only(FindingKind::kWildAccess, [] { Load(&words[3], 1); });
  Only(FindingKind::kOutOfBounds, [] { Load(reinterpret_cast<const uint64_t*>(&words[4]), 1); });
}

TEST_F(AccessTest, ThreadsRaceInAddressedMemory) {
  static uint32_t word;
  launch_.addressed_ranges = {{&word, &word + 1, true}};
  launch_.threads_per_threadgroup = {2, 1, 1};
  const Report report = Run([] { Store(&word, 1U, 1); });
  EXPECT_EQ(Of(report, FindingKind::kRace).size(), 1U) << Text(report);
}

TEST_F(AccessTest, AddressedMemoryOverlapsNoBufferThatIsWritten) {
  const auto message = [&] { return TryRun([] {}).status().message(); };
  launch_.addressed_ranges = {{&words_[7], &words_[8], false}};
  EXPECT_NE(message().find("overlaps memory"), std::string::npos) << message();
  launch_.buffers[0].read_only = true;
  EXPECT_EQ(message(), "");
  launch_.addressed_ranges[0].written = true;
  EXPECT_NE(message().find("overlaps memory"), std::string::npos) << message();
}

TEST_F(AccessTest, ReportsWhatWasRead) {
  static uint32_t words[] = {3, 4, 5};
  launch_.addressed_ranges = {{&words[0], &words[3], true}};
  const Report report = Run([] {
    Load(&words[0], 1);
    Store(&words[2], 1U, 2);
  });
  ASSERT_FALSE(report.observed.empty());
  const ObservedAccess& last = report.observed.back();
  EXPECT_EQ(last.data, &words[0]);
  EXPECT_EQ(last.read.From(0), 0xfU);
  EXPECT_EQ(last.written.From(0), 0xf00U);
  EXPECT_EQ(last.written.From(7), 0x1eU);
}

TEST_F(AccessTest, OnlyTheOwnStackIsPrivate) {
  static uint32_t* shared;
  launch_.threads_per_threadgroup = {2, 1, 1};
  const std::function<void(uint32_t)> pass = [](uint32_t reader) {
    uint32_t mine = 0;
    if (ThreadIndex() == 0) shared = &mine;
    Sim().threadgroup_barrier(kThreadgroup, Site(10));
    if (ThreadIndex() == reader) Load(shared, 1);
    Sim().threadgroup_barrier(kThreadgroup, Site(11));
  };
  EXPECT_TRUE(Run([pass] { pass(0); }).clean());
  const Report report = Run([pass] { pass(1); });
  ASSERT_EQ(Of(report, FindingKind::kWildAccess).size(), 1U) << Text(report);
  EXPECT_NE(report.findings[0].text.find("private memory"), std::string::npos);
}

TEST_F(AccessTest, ThreadgroupVariablesHaveBounds) {
  for (const int offset : {-1, 6, 7}) {
    const Finding finding = Only(FindingKind::kOutOfBounds, [offset] {
      Tile<uint32_t>(4, 0, "other");
      auto* tile = Tile<uint16_t>(7, 1, "tile");
      Store(reinterpret_cast<uint32_t*>(tile + offset), 1U, 1);
    });
    EXPECT_EQ(finding.text, "tile, byte " + std::to_string(2 * offset) +
                                " of 14 (threadgroup memory): write of 4 bytes by thread 0 of "
                                "threadgroup (0,0,0)");
  }
}

TEST_F(AccessTest, AnotherThreadgroupsMemoryIsForeign) {
  static uint32_t* first;
  launch_.grid = {2, 1, 1};
  launch_.threads_per_threadgroup = {1, 1, 1};
  const Report report = Run([] {
    uint32_t* tile = Tile<uint32_t>(4);
    if (GroupIndex() == 0) {
      first = tile;
      Sim().threadgroup_barrier(kNone, Site(10));
    } else {
      Store(first, 1U, 1);
    }
  });
  ASSERT_EQ(report.findings.size(), 1U) << Text(report);
  EXPECT_EQ(report.findings[0].kind, FindingKind::kForeignThreadgroupMemory);
}

TEST_F(AccessTest, ThreadgroupMemoryBeginsUninitialised) {
  launch_.grid = {3, 1, 1};
  options_.resident_threadgroups = 1;
  // Writes of an earlier threadgroup in the same place do not initialise the memory.
  const Report report = Run([] {
    uint32_t* tile = Tile<uint32_t>(64);
    if (GroupIndex() != 1) Store(&tile[ThreadIndex()], 1U, 1);
    Load(&tile[ThreadIndex()], 2);
  });
  ASSERT_EQ(report.findings.size(), 1U) << Text(report);
  EXPECT_EQ(report.findings[0].kind, FindingKind::kUninitialisedRead);
  EXPECT_EQ(report.findings[0].count, 64U);
  EXPECT_NE(report.findings[0].text.find("threadgroup (1,0,0)"), std::string::npos);
}

TEST_F(AccessTest, PartlyWrittenWordsAreUninitialised) {
  const Finding finding = Only(FindingKind::kUninitialisedRead, [] {
    auto* tile = Tile<uint16_t>(4);
    Store(&tile[0], uint16_t{1}, 1);
    Load(reinterpret_cast<uint32_t*>(tile), 2);
  });
  EXPECT_NE(finding.text.find("tile, byte 2 of 8"), std::string::npos) << finding.text;
}

TEST_F(AccessTest, BuffersAreInitialisedUnlessBoundOtherwise) {
  const auto read = [] { Load(Buffer<uint32_t>(0) + 1, 1); };
  EXPECT_TRUE(Run(read).clean());
  launch_.buffers[0].initialised = false;
  Only(FindingKind::kUninitialisedRead, read);
  Only(FindingKind::kUninitialisedRead, [] { AtomicAdd(Buffer<uint32_t>(0), 1U, 1); });
  EXPECT_TRUE(Run([] {
                Store(Buffer<uint32_t>(0), 5U, 1);
                Load(Buffer<uint32_t>(0), 2);
              }).clean());
  launch_.buffers[0].read_only = true;
  Only(FindingKind::kUninitialisedRead, read);
}

TEST_F(AccessTest, ReadOnlyBuffersAreNotWritten) {
  launch_.buffers[0].read_only = true;
  launch_.values[3] = {1, 2, 3, 4};
  const Finding finding =
      Only(FindingKind::kReadOnlyWrite, [] { Store(Buffer<uint32_t>(0) + 2, 1U, 1); });
  EXPECT_EQ(finding.text,
            "out, byte 8 of 1024 (device memory, read-only): written by thread 0 of threadgroup "
            "(0,0,0)");
  EXPECT_EQ(words_[2], 0U);
  Only(FindingKind::kReadOnlyWrite, [] { Store(Buffer<uint32_t>(3), 1U, 1); });
}

TEST_F(AccessTest, ThreadgroupMemoryHasALimit) {
  const auto use = [] { Tile<uint8_t>(16384, 0), Tile<uint8_t>(16384, 1); };
  EXPECT_TRUE(Run(use).clean());
  options_.threadgroup_memory_limit = 32767;
  EXPECT_EQ(Only(FindingKind::kThreadgroupMemoryLimit, use).text,
            "tile (16384 bytes) makes 32768 bytes of threadgroup memory, at most 32767");
  Only(FindingKind::kThreadgroupMemoryLimit, [] {
    Tile<uint8_t>(size_t{8} << 20);
    ADD_FAILURE() << "there is no such memory";
  });
}

TEST_F(AccessTest, WithoutChecksBoundsRemain) {
  options_.check = false;
  Only(FindingKind::kOutOfBounds, [] {
    Load(Tile<uint32_t>(4), 1);
    Store(Buffer<uint32_t>(0) + 256, 1U, 2);
  });
}

}  // namespace
}  // namespace metal_sim::simulator_access_test
