// Threads that the system cannot start are an error and never abort the process.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "marlin/device.h"
#include "marlin/quantize.h"

namespace marlin::thread_limit_test {
namespace {

// Sanitizers reserve terabytes of address space, and only Linux reports it in /proc.
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
constexpr bool kCanLimit = true;
#else
constexpr bool kCanLimit = false;
#endif

#define SKIP_WITHOUT_LIMIT() \
  if (!kCanLimit) GTEST_SKIP() << "address space cannot be limited here"

/// Allows this process to map `mebibytes` more than now.
void LimitAddressSpace(int64_t mebibytes) {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const auto bytes = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE) + mebibytes * (1 << 20));
  const rlimit limit{bytes, bytes};
  if (pages == 0 || setrlimit(RLIMIT_AS, &limit) != 0) std::_Exit(100);
}

/// Exits with 0 for the expected error, whose text goes to stderr.
[[noreturn]] void Finish(const Status& status) {
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::_Exit(status.code() == Code::kOutOfMemory ? 0 : 1);
}

// Stacks are usually 8 MiB: a few threads start.
constexpr int64_t kRoomForSomeThreads = 100;
constexpr int64_t kRoomForNoThread = 4;

TEST(ThreadLimit, APoolThrowsWithBothNumbersAndEndsTheThreadsThatStarted) {
  SKIP_WITHOUT_LIMIT();
  const auto start = [] {
    LimitAddressSpace(kRoomForSomeThreads);
    for (int round = 0; round < 3; ++round) {  // Each pool must release its stacks.
      try {
        ThreadPool pool(500);
        std::_Exit(2);
      } catch (const ThreadStartError& error) {
        std::fprintf(stderr, "%s\n", error.what());
      }
    }
    ThreadPool pool(2);
    int64_t sum[2] = {};
    pool.Run(2, [&](int64_t task, int) { sum[task] = task + 1; });
    std::_Exit(sum[0] + sum[1] == 3 ? 0 : 3);
  };
  EXPECT_EXIT(start(), ::testing::ExitedWithCode(0), "threads: [0-9]+ of 500 can run: ");
}

TEST(ThreadLimit, OpeningADeviceIsAnError) {
  SKIP_WITHOUT_LIMIT();
  const auto open = [] {
    LimitAddressSpace(kRoomForSomeThreads);
    DeviceOptions options;
    options.threads = 500;
    const Result<Device> device = Device::Open("cpu", options);
    Finish(device.ok() ? Status() : device.status());
  };
  EXPECT_EXIT(open(), ::testing::ExitedWithCode(0), "device: threads: [0-9]+ of 500 can run: ");
}

TEST(ThreadLimit, QuantizingIsAnError) {
  SKIP_WITHOUT_LIMIT();
  if (ThreadPool::AvailableProcessors() < 2) GTEST_SKIP() << "one processor: no thread is started";
  const auto quantize = [] {
    const std::vector<float> dense(size_t{1024} * 512, 1.0f);
    LimitAddressSpace(kRoomForNoThread);
    const Result<QuantizedWeights> weights =
        Quantize(TensorView(dense.data(), DType::kF32, {1024, 512}),
                 {.format = Format::kFp4E2M1, .group_size = 64});
    Finish(weights.ok() ? Status() : weights.status());
  };
  EXPECT_EXIT(quantize(), ::testing::ExitedWithCode(0), "quantize: threads: 1 of [0-9]+ can run: ");
}

}  // namespace
}  // namespace marlin::thread_limit_test
