// Launches as a whole: positions, edges, seeds, counters, bindings, and the errors of Simulate.
#include <algorithm>

#include "simulator_fixture.h"

namespace metal_sim::simulator_launch_test {
namespace {

class LaunchTest : public SimulatorTest {
 protected:
  void ExpectError(Code code, const std::string& message) {
    const Result<Report> report = TryRun([] { ADD_FAILURE() << "the kernel ran"; });
    ASSERT_FALSE(report.ok());
    EXPECT_EQ(report.status().code(), code);
    EXPECT_EQ(report.status().message(), message);
  }
};

TEST_F(LaunchTest, EveryThreadRunsOnceAtItsPosition) {
  launch_.grid = {2, 3, 2};
  launch_.threads_per_threadgroup = {4, 2, 2};
  words_.assign(8 * 6 * 4, 0);
  const Report report = Run([] {
    const Triple at = Sim().position(Source::kThreadPositionInGrid);
    const Triple size = Sim().position(Source::kThreadsPerGrid);
    EXPECT_EQ(size.x, 8U);
    AtomicAdd(Buffer<uint32_t>(0) + (at.z * size.y + at.y) * size.x + at.x, 1U, 1);
  });
  EXPECT_TRUE(report.clean()) << Text(report);
  EXPECT_EQ(words_, std::vector<uint32_t>(8 * 6 * 4, 1));
  EXPECT_EQ(report.counters.threads, 192);
  EXPECT_EQ(report.counters.threadgroups, 12);
}

TEST_F(LaunchTest, ThreadgroupsAtTheEdgesAreSmaller) {
  launch_.grid_counts_threads = true;
  launch_.grid = {70, 3, 1};
  launch_.threads_per_threadgroup = {40, 2, 1};
  const Report report = Run([] {
    const Triple group = Sim().position(Source::kThreadgroupPositionInGrid);
    const Triple size = Sim().position(Source::kThreadsPerThreadgroup);
    EXPECT_EQ(size.x, group.x == 1 ? 30U : 40U);
    EXPECT_EQ(size.y, group.y == 1 ? 1U : 2U);
    EXPECT_EQ(Sim().position(Source::kDispatchThreadsPerThreadgroup).x, 40U);
    EXPECT_EQ(Sim().position(Source::kThreadgroupsPerGrid).y, 2U);
    EXPECT_EQ(Sim().position(Source::kSimdgroupsPerThreadgroup).x, (size.x * size.y + 31) / 32);
    const Triple at = Sim().position(Source::kThreadPositionInThreadgroup);
    EXPECT_EQ(ThreadIndex(), at.y * size.x + at.x);
    EXPECT_EQ(Sim().position(Source::kThreadIndexInSimdgroup).x, ThreadIndex() % 32);
    EXPECT_EQ(Sim().lane(), ThreadIndex() % 32);
    EXPECT_EQ(Sim().position(Source::kSimdgroupIndexInThreadgroup).x, ThreadIndex() / 32);
    EXPECT_EQ(Sim().position(Source::kQuadgroupIndexInThreadgroup).x, ThreadIndex() / 4);
    // Threads that do not exist are not missed.
    Sim().threadgroup_barrier(kThreadgroup, Site(1));
    Sim().simdgroup_barrier(kThreadgroup, Site(2));
    AtomicAdd(Buffer<uint32_t>(0), 1U, 3);
  });
  EXPECT_TRUE(report.clean()) << Text(report);
  EXPECT_EQ(words_[0], 210U);
}

TEST_F(LaunchTest, SeedsDecideTheScheduleAndRepeat) {
  launch_.grid = {4, 1, 1};
  words_.assign(257, 0);
  const auto come_by = [this](uint64_t seed) {
    options_.seed = seed;
    options_.preemption = 0.2;
    words_.assign(257, 0);
    EXPECT_TRUE(Run([] {
                  uint32_t* out = Buffer<uint32_t>(0);
                  const uint32_t turn = AtomicAdd(&out[256], 1U, 1);
                  Store(&out[turn], 64 * GroupIndex() + ThreadIndex(), 2);
                }).clean());
    return std::vector<uint32_t>(words_.begin(), words_.end() - 1);
  };
  const std::vector<uint32_t> in_order = come_by(0);
  EXPECT_TRUE(std::is_sorted(in_order.begin(), in_order.end()));
  const std::vector<uint32_t> first = come_by(7);
  EXPECT_EQ(first, come_by(7));
  EXPECT_NE(first, come_by(8));
  EXPECT_NE(first, in_order);
  std::vector<uint32_t> sorted = first;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(sorted, in_order);
}

TEST_F(LaunchTest, SeedsShuffleTheThreadsOfAThreadgroup) {
  options_.seed = 1;
  Run([] {
    uint32_t* out = Buffer<uint32_t>(0);
    Store(&out[1 + AtomicAdd(out, 1U, 1)], ThreadIndex(), 2);
  });
  EXPECT_FALSE(std::is_sorted(words_.begin() + 1, words_.begin() + 65));
}

TEST_F(LaunchTest, ResidentThreadgroupsAreInterleaved) {
  launch_.grid = {3, 1, 1};
  launch_.threads_per_threadgroup = {1, 1, 1};
  for (const int resident : {1, 3}) {
    options_.resident_threadgroups = resident;
    words_.assign(256, 0);
    Run([] {
      uint32_t* out = Buffer<uint32_t>(0);
      for (int i = 0; i < 2; ++i) {
        Store(&out[1 + AtomicAdd(out, 1U, 1)], GroupIndex(), 2);
        Sim().threadgroup_barrier(kNone, Site(3));
      }
    });
    const std::vector<uint32_t> order(words_.begin() + 1, words_.begin() + 7);
    EXPECT_EQ(order, resident == 1 ? (std::vector<uint32_t>{0, 0, 1, 1, 2, 2})
                                   : (std::vector<uint32_t>{0, 1, 2, 0, 1, 2}));
  }
}

TEST_F(LaunchTest, CountersCountBytesAndOperations) {
  const std::vector<uint16_t> half(64, 3);
  launch_.buffers[2].data = const_cast<uint16_t*>(half.data());
  launch_.buffers[2].bytes = 128;
  launch_.buffers[2].read_only = true;
  launch_.buffers[2].name = "half";
  launch_.threadgroup_memory[0] = 64;
  launch_.grid = {2, 1, 1};
  const Report report = Run([] {
    const uint32_t thread = ThreadIndex();
    uint16_t sum = 0;
    for (uint32_t i = 0; i < 2; ++i) {
      sum = static_cast<uint16_t>(sum + Load(Buffer<uint16_t>(2) + thread / 2, 1));
    }
    Store(Tile<uint16_t>(64) + thread, sum, 2);
    Load(Tile<uint16_t>(64) + thread, 3);
    Store(Buffer<uint32_t>(0) + GroupIndex() * 64 + thread, uint32_t{sum}, 4);
    if (thread == 0) Sim().count_matrix_operation(512);
  });
  EXPECT_TRUE(report.clean()) << Text(report);
  const Counters& counters = report.counters;
  ASSERT_EQ(counters.buffers.size(), 2U);
  EXPECT_EQ(counters.buffers[0].name, "out");
  EXPECT_EQ(counters.buffers[0].writes, 128);
  EXPECT_EQ(counters.buffers[0].bytes_written, 512);
  EXPECT_EQ(counters.buffers[0].unique_bytes_written, 512);
  EXPECT_EQ(counters.buffers[0].reads, 0);
  EXPECT_EQ(counters.buffers[1].name, "half");
  EXPECT_EQ(counters.buffers[1].reads, 256);
  EXPECT_EQ(counters.buffers[1].bytes_read, 512);
  EXPECT_EQ(counters.buffers[1].unique_bytes_read, 64);
  EXPECT_EQ(counters.threadgroup_bytes, 64 + 128);
  EXPECT_EQ(counters.threadgroup_bytes_written, 256);
  EXPECT_EQ(counters.threadgroup_bytes_read, 256);
  EXPECT_EQ(counters.matrix_operations, 2);
  EXPECT_EQ(counters.multiply_adds, 1024);
  EXPECT_EQ(words_[127], 6U);
}

TEST_F(LaunchTest, ValuesAndThreadgroupArgumentsArrive) {
  arguments_.push_back({Source::kBuffer, 1, "count"});
  arguments_.push_back({Source::kThreadgroupMemory, 0, "scratch"});
  launch_.values[1] = {40, 0, 0, 0};
  launch_.threadgroup_memory[0] = 256;
  const Report report = Run([] {
    auto* scratch = static_cast<uint32_t*>(Sim().threadgroup_memory(0));
    Store(&scratch[ThreadIndex()], Load(Buffer<uint32_t>(1), 1), 2);
    Store(Buffer<uint32_t>(0) + ThreadIndex(), Load(&scratch[ThreadIndex()], 3) + 2, 4);
    if (ThreadIndex() == 0) Load(&scratch[64], 5);
  });
  ASSERT_EQ(report.findings.size(), 1U) << Text(report);
  EXPECT_NE(report.findings[0].text.find("scratch, byte 256 of 256"), std::string::npos);
  EXPECT_EQ(words_[63], 42U);
}

TEST_F(LaunchTest, FindingsAreGroupedAndLimited) {
  const Report grouped = Run([] { Load(Buffer<uint32_t>(0) + 256, 1); });
  ASSERT_EQ(grouped.findings.size(), 1U);
  EXPECT_EQ(grouped.findings[0].count, 64U);
  const Report many = Run([] {
    for (uintptr_t site = 0; site < 3000; ++site) Load(Buffer<uint32_t>(0) + 256, site);
  });
  EXPECT_EQ(many.findings.size(), 1000U);
}

TEST_F(LaunchTest, ManyThreadgroupsReuseTheirPlaces) {
  launch_.grid = {500, 1, 1};
  launch_.threads_per_threadgroup = {33, 1, 1};
  const Report report = Run([] {
    uint32_t* tile = Tile<uint32_t>(33);
    Store(&tile[ThreadIndex()], 1U, 1);
    Sim().threadgroup_barrier(kThreadgroup, Site(2));
    AtomicAdd(Buffer<uint32_t>(0), Load(&tile[32 - ThreadIndex()], 3), 4);
  });
  EXPECT_TRUE(report.clean()) << Text(report);
  EXPECT_EQ(words_[0], 500U * 33);
}

TEST_F(LaunchTest, TheTableDoesNothingOutsideOfALaunch) {
  EXPECT_EQ(Sim().buffer(0), nullptr);
  EXPECT_EQ(Sim().threadgroup_memory(0), nullptr);
  EXPECT_EQ(Tile<int>(4), nullptr);
  EXPECT_EQ(Sim().lane(), 0U);
  Sim().threadgroup_barrier(kThreadgroup, Site(1));
  Sim().access(nullptr, 4, true, Site(2));
}

TEST_F(LaunchTest, WrongSizesAreRefused) {
  launch_.threads_per_threadgroup = {1025, 1, 1};
  ExpectError(Code::kInvalidArgument,
              "threads per threadgroup: 1025x1x1, expected 1 to 1024 threads");
  launch_.threads_per_threadgroup = {32, 0, 1};
  ExpectError(Code::kInvalidArgument,
              "threads per threadgroup: 32x0x1, expected 1 to 1024 threads");
  launch_.threads_per_threadgroup = {65536, 65536, 65536};
  ExpectError(Code::kInvalidArgument,
              "threads per threadgroup: 65536x65536x65536, expected 1 to 1024 threads");
  launch_.threads_per_threadgroup = {32, 1, 1};
  launch_.grid = {1, 0, 1};
  ExpectError(Code::kInvalidArgument, "grid: 1x0x1 is empty");
  launch_.grid = {1U << 31, 1, 1};
  ExpectError(Code::kInvalidArgument, "grid: 2147483648x1x1 threadgroups, at most 268435456");
  launch_.grid = {1U << 31, 1U << 31, 4};
  ExpectError(Code::kInvalidArgument,
              "grid: 2147483648x2147483648x4 threadgroups, at most 268435456");
  launch_.grid = {1U << 28, 1, 1};
  ExpectError(Code::kInvalidArgument,
              "grid: 268435456x1x1 threadgroups of 32x1x1 threads: positions exceed 32 bits");
}

TEST_F(LaunchTest, MissingBindingsAreRefused) {
  arguments_.push_back({Source::kBuffer, 4, "scales"});
  ExpectError(Code::kInvalidArgument, "kernel: argument scales (buffer 4) is not bound");
  launch_.buffers[4].bytes = 8;
  ExpectError(Code::kInvalidArgument, "scales (buffer 4): 8 bytes at no address");
  launch_.buffers.erase(4);
  launch_.values[4] = {};
  ExpectError(Code::kInvalidArgument, "scales (buffer 4): a value of 0 bytes, expected 1 to 4096");
  launch_.values[4] = {1};
  arguments_.push_back({Source::kThreadgroupMemory, 1, "scratch"});
  ExpectError(Code::kInvalidArgument,
              "kernel: the length of scratch (threadgroup memory 1) is not set");
  launch_.threadgroup_memory[1] = 24;
  ExpectError(Code::kInvalidArgument, "threadgroup memory 1: 24 bytes, expected a multiple of 16");
}

TEST_F(LaunchTest, OverlappingBuffersAreRefusedIfWritten) {
  launch_.buffers[1].data = words_.data() + 255;
  launch_.buffers[1].bytes = 4;
  launch_.buffers[1].read_only = true;
  launch_.buffers[1].name = "tail";
  ExpectError(Code::kUnsupported,
              "out (buffer 0) and tail (buffer 1) overlap, and one is not read-only");
  launch_.buffers[0].read_only = true;
  EXPECT_TRUE(Run([] {}).clean());
}

TEST_F(LaunchTest, OptionsOutOfRangeAreRefused) {
  options_.resident_threadgroups = 0;
  ExpectError(Code::kInvalidArgument, "resident_threadgroups: 0, expected 1 to 64");
  options_.resident_threadgroups = 1;
  options_.preemption = 1.5;
  ExpectError(Code::kInvalidArgument, "preemption: 1.5, expected 0 to 1");
  options_.preemption = 0;
  options_.step_limit = 0;
  ExpectError(Code::kInvalidArgument, "step_limit: 0, expected at least 1");
}

TEST_F(LaunchTest, HugeBuffersAreRefused) {
  arguments_.clear();
  launch_.buffers[1].data = words_.data();
  launch_.buffers[1].bytes = int64_t{1} << 60;
  launch_.buffers[1].name = "huge";
  words_.clear();
  const Result<Report> report = TryRun([] {});
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.status().code(), Code::kOutOfMemory);
}

}  // namespace
}  // namespace metal_sim::simulator_launch_test
