// The driver for Apple GPUs on a fake GPU: its Metal calls, their order, and the handling of
// Metal's errors. All tests here run the self-test kernel; apple_products_test.cc compares results
// with the simulator's own device.
#include "backends/metal/apple/apple_driver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "apple_driver_fixture.h"

namespace marlin::metal {
namespace {

using testing::Contains;
using testing::HasSubstr;
using testing::Not;

TEST_F(AppleDriver, OpensWithItsSelfTest) {
  Open();
  const DriverInfo info = driver_->Info();
  EXPECT_EQ(info.name, "metal");
  EXPECT_EQ(info.model, "Apple M2");
  EXPECT_THAT(info.features, Contains("GPU family Apple8"));
  EXPECT_THAT(info.features, Contains("2 cores (counted)"));
  EXPECT_THAT(info.features, Contains("macOS Version 0.0 (a stand-in)"));
  EXPECT_THAT(info.features, Contains("kernels compiled here"));
  EXPECT_THAT(info.features, Contains("known matrix fragments"));
  EXPECT_THAT(info.features, Contains("residency set"));
  EXPECT_TRUE(driver_->Shape().known_fragments);
  EXPECT_FALSE(driver_->calls_block());
  EXPECT_EQ(TheLog().dispatches, 1);
}

TEST_F(AppleDriver, OpensOnlyOnItsGpus) {
  TheBehaviour().there = false;  // As in a process without a graphical session.
  EXPECT_TRUE(OpenError().ok());
  TheBehaviour().listed = false;
  EXPECT_EQ(OpenError().code(), Code::kUnsupported);
  EXPECT_THAT(OpenError().message(), HasSubstr("no GPU"));
  TheBehaviour() = {};
  TheBehaviour().name = "AMD Radeon Pro";
  TheBehaviour().family = 0;
  TheBehaviour().simdgroup_threads = 64;
  EXPECT_EQ(OpenError().code(), Code::kUnsupported);
  EXPECT_THAT(OpenError().message(), HasSubstr("AMD Radeon Pro: needs a GPU of Apple silicon"));
  EXPECT_THAT(OpenError().message(), HasSubstr("expected simdgroups of 32 threads, got 64"));
}

// The GPU of a hosted Mac reports an old family, and runs the kernels.
TEST_F(AppleDriver, OpensOnTheGpuOfAVirtualMachine) {
  Open();
  EXPECT_THAT(driver_->Info().features, Not(Contains("virtual GPU")));
  driver_.reset();
  TheBehaviour().name = "Apple Paravirtual device";
  TheBehaviour().family = 5;
  Open();
  EXPECT_THAT(driver_->Info().features, Contains("GPU family Apple5"));
  EXPECT_THAT(driver_->Info().features, Contains("virtual GPU"));
  EXPECT_TRUE(driver_->Shape().known_fragments);
}

TEST_F(AppleDriver, ProbesShufflesAndAddresses) {
  TheBehaviour().breaks_shuffles = true;
  EXPECT_EQ(OpenError().code(), Code::kUnsupported);
  EXPECT_THAT(OpenError().message(), HasSubstr("self-test: simd_shuffle or simd_sum"));
  TheBehaviour() = {};
  TheBehaviour().breaks_addresses = true;
  EXPECT_EQ(OpenError().code(), Code::kUnsupported);
  EXPECT_THAT(OpenError().message(), HasSubstr("through an address in a buffer"));
}

TEST_F(AppleDriver, TellsWhatTheSelfTestFinds) {
  TheBehaviour().rotates_fragments = true;
  Open();
  EXPECT_FALSE(driver_->Shape().known_fragments);
  EXPECT_THAT(driver_->Info().features, Contains("unknown matrix fragments"));
  driver_.reset();
  TheBehaviour().breaks_products = true;
  EXPECT_EQ(OpenError().code(), Code::kUnsupported);
  EXPECT_THAT(OpenError().message(), HasSubstr("product of two 8x8 matrices is wrong"));
  ASSERT_EQ(setenv("MARLIN_METAL_SELF_TEST", "0", 1), 0);
  Open();
  ASSERT_EQ(unsetenv("MARLIN_METAL_SELF_TEST"), 0);
  EXPECT_FALSE(driver_->Shape().known_fragments);
}

TEST_F(AppleDriver, CountsCores) {
  const auto cores = [&] {
    Open();
    const int count = driver_->Shape().cores;
    driver_.reset();
    return count;
  };
  TheBehaviour().cores = 30;
  EXPECT_EQ(cores(), 30);
  TheBehaviour().registered_by_number = false;
  EXPECT_EQ(cores(), 30);
  TheBehaviour().registered_by_class = false;
  EXPECT_EQ(cores(), 10);
  TheBehaviour().name = "Apple M77";
  EXPECT_EQ(cores(), 8);
}

TEST_F(AppleDriver, CompilesStrictly) {
  for (const bool math_modes : {true, false}) {
    fake_gpu::Reset();
    TheBehaviour().math_modes = math_modes;
    TheLog().fast_math = true;
    TheBehaviour().compiler_warning = "unused variable";
    Open();
    EXPECT_FALSE(TheLog().fast_math);
  }
}

TEST_F(AppleDriver, CompilesAFunctionOnceForItsConstants) {
  Open();
  float* const input = DeviceInput(1);
  float* const out = Floats(kOutputs);
  KernelLaunch launch = LaunchOf(input, out);
  EXPECT_TRUE(Run(launch).ok());
  EXPECT_EQ(TheLog().sources, 1);
  EXPECT_EQ(TheLog().pipelines, 1);
  launch.constants[0] = 1;
  EXPECT_TRUE(Run(launch).ok());
  EXPECT_EQ(TheLog().sources, 1);
  EXPECT_EQ(TheLog().pipelines, 2);
}

/// A folder for caches of drivers, instead of the user's.
class HomeFolder {
 public:
  HomeFolder() {
    std::string path = (std::filesystem::temp_directory_path() / "marlin-home-XXXXXX").string();
    EXPECT_NE(mkdtemp(path.data()), nullptr);
    path_ = path;
    EXPECT_EQ(setenv("HOME", path.c_str(), 1), 0);
  }
  ~HomeFolder() {
    std::filesystem::remove_all(path_);
    unsetenv("HOME");
  }
  HomeFolder(const HomeFolder&) = delete;
  HomeFolder& operator=(const HomeFolder&) = delete;

  /// The files in the caches of all kernels, systems and GPUs.
  std::vector<std::filesystem::path> Files() const {
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path_)) {
      if (entry.is_regular_file()) files.push_back(entry.path());
    }
    return files;
  }

 private:
  std::filesystem::path path_;
};

TEST_F(AppleDriver, KeepsPipelinesAndTestsForLaterProcesses) {
  const HomeFolder home;
  Open();
  EXPECT_EQ(TheLog().pipelines, 1);
  EXPECT_FALSE(driver_->kernels_known_right());
  driver_->RememberRightKernels();
  driver_.reset();
  EXPECT_EQ(home.Files().size(), 3u);
  TheLog() = {};

  Open();
  EXPECT_TRUE(driver_->kernels_known_right());
  EXPECT_TRUE(driver_->Shape().known_fragments);
  EXPECT_EQ(TheLog().dispatches, 0);
  ASSERT_TRUE(Run(LaunchOf(DeviceInput(1), Floats(kOutputs))).ok());
  EXPECT_EQ(TheLog().pipelines, 0);
  EXPECT_EQ(TheLog().found_pipelines, 1);
  driver_.reset();
  EXPECT_EQ(home.Files().size(), 3u);

  TheLog() = {};
  ASSERT_EQ(setenv("METAL_MARLIN_METAL_SELF_TEST", "all", 1), 0);
  Open();
  ASSERT_EQ(unsetenv("METAL_MARLIN_METAL_SELF_TEST"), 0);
  EXPECT_EQ(TheLog().dispatches, 1);
  driver_.reset();

  // Another GPU has another cache.
  TheBehaviour().name = "Apple M3";
  Open();
  EXPECT_FALSE(driver_->kernels_known_right());
}

TEST_F(AppleDriver, ACacheThatCannotBeUsedIsNone) {
  const HomeFolder home;
  Open();
  driver_.reset();
  for (const auto& file : home.Files()) std::ofstream(file) << "not what was there";
  TheLog() = {};
  Open();
  EXPECT_EQ(TheLog().dispatches, 1);
  EXPECT_EQ(TheLog().pipelines, 1);
  driver_.reset();
  ASSERT_EQ(setenv("HOME", "/proc/no such folder", 1), 0);
  Open();
  EXPECT_FALSE(driver_->kernels_known_right());
}

TEST_F(AppleDriver, CompilesTheKernelsOfACallTogether) {
  Open();
  float* const input = DeviceInput(1);
  std::vector<KernelLaunch> launches;
  for (int i = 0; i < 6; ++i) {
    launches.push_back(LaunchOf(input, Floats(kOutputs)));
    launches.back().constants[0] = 1 + i % 3;
  }
  TheLog() = {};
  ASSERT_TRUE(driver_->Run(launches, nullptr).ok());
  EXPECT_EQ(TheLog().pipelines, 3);
  ASSERT_TRUE(driver_->Synchronize(nullptr).ok());
}

TEST_F(AppleDriver, TakesTheLibraryOfTheBuild) {
  TheBehaviour().built_library = "self_test.metal\n";
  Open();
  EXPECT_EQ(TheLog().sources, 0);
  EXPECT_THAT(driver_->Info().features, Contains("kernels compiled by the build"));
  driver_.reset();
  TheBehaviour().refuses_built_library = true;
  Open();
  EXPECT_EQ(TheLog().sources, 1);
  EXPECT_THAT(driver_->Info().features, Contains("kernels compiled here"));
}

TEST_F(AppleDriver, SaysWhyAKernelDoesNotCompile) {
  TheBehaviour().compiler_error = "program_source:3:1: error: unknown type name 'halfs'";
  EXPECT_EQ(OpenError().code(), Code::kUnsupported);
  EXPECT_THAT(OpenError().message(), HasSubstr("self_test.metal does not compile"));
  EXPECT_THAT(OpenError().message(), HasSubstr("unknown type name 'halfs'"));
  TheBehaviour() = {};
  TheBehaviour().missing_function = "marlin_self_test";
  EXPECT_EQ(OpenError().code(), Code::kUnsupported);
  EXPECT_THAT(OpenError().message(), HasSubstr("no function marlin_self_test"));
  TheBehaviour() = {};
  TheBehaviour().most_threads = 16;
  EXPECT_EQ(OpenError().code(), Code::kUnsupported);
  EXPECT_THAT(OpenError().message(), HasSubstr("32 threads per threadgroup, this GPU takes 16"));
  TheBehaviour() = {};
  TheBehaviour().simdgroup_threads = 64;
  EXPECT_EQ(OpenError().code(), Code::kUnsupported);
  EXPECT_THAT(OpenError().message(), HasSubstr("expected simdgroups of 32 threads, got 64"));
}

TEST_F(AppleDriver, DoesNotBlock) {
  Open();
  float* const input = DeviceInput(1);
  float* const out = Floats(kOutputs);
  const int64_t before = TheLog().dispatches;
  EXPECT_TRUE(Run(LaunchOf(input, out)).ok());
  EXPECT_TRUE(Run(LaunchOf(input, out)).ok());
  EXPECT_EQ(TheLog().dispatches, before);
  EXPECT_TRUE(driver_->Synchronize(nullptr).ok());
  EXPECT_EQ(TheLog().dispatches, before + 2);
  EXPECT_EQ(out[128], 1);
  EXPECT_EQ(out[128 + 63], 64);
}

TEST_F(AppleDriver, LaunchesOfARunAreOneCommandBuffer) {
  Open();
  float* const input = DeviceInput(5);
  float* const out = Floats(2 * kOutputs + 61);
  // The GEMM result of the first launch, at out[128], is the second launch's A; after it there is
  // no address.
  std::memset(out, 0, (2 * kOutputs + 61) * 4);
  float* const last = Floats(kOutputs);
  std::vector<KernelLaunch> launches = {LaunchOf(input, out), LaunchOf(out + 128, last)};
  const int64_t before = TheLog().command_buffers;
  ASSERT_TRUE(driver_->Run(launches, nullptr).ok());
  ASSERT_TRUE(driver_->Synchronize(nullptr).ok());
  EXPECT_EQ(TheLog().command_buffers, before + 1);
  EXPECT_EQ(last[0], 5);  // Lane 0 holds A's first element.
}

TEST_F(AppleDriver, FreedMemoryLivesUntilItsWorkIsDone) {
  Open();
  float* const input = DeviceInput(3);
  float* const out = Floats(kOutputs);
  ASSERT_TRUE(Run(LaunchOf(input, out)).ok());
  driver_->Free(input);
  ASSERT_TRUE(driver_->Synchronize(nullptr).ok());
  EXPECT_EQ(out[128], 3);
  driver_->Free(nullptr);
}

TEST_F(AppleDriver, KeepsAllocationsResident) {
  Open();
  const int64_t before = TheLog().resident;
  constexpr int64_t kAlone = 25'000'000;  // A buffer of its own.
  float* const data = Floats(kAlone);
  EXPECT_EQ(TheLog().resident, before + 1);
  driver_->Free(data);
  EXPECT_EQ(TheLog().resident, before);
  // Allocations beyond the recommended size are not made resident.
  ASSERT_TRUE(driver_->Allocate(int64_t{1} << 30).ok());
  EXPECT_EQ(TheLog().resident, before);
  driver_.reset();
  TheBehaviour().residency_sets = false;
  fake_gpu::TheLog() = {};
  Open();
  Floats(1000);
  EXPECT_EQ(TheLog().resident, 0);
  EXPECT_THAT(driver_->Info().features, Not(Contains("residency set")));
}

TEST_F(AppleDriver, MemoryRunsOut) {
  Open();
  TheBehaviour().largest_buffer = 1000;
  Result<void*> data = driver_->Allocate(1001);
  EXPECT_EQ(data.status().code(), Code::kOutOfMemory);
  EXPECT_THAT(data.status().message(), HasSubstr("a buffer of 1001 bytes, this GPU takes 1000"));
  TheBehaviour().largest_buffer = 1 << 20;
  TheBehaviour().buffers_until_full = 0;
  EXPECT_EQ(driver_->Allocate(1 << 20).status().code(), Code::kOutOfMemory);
  const std::vector<float> input = Input(1);
  std::vector<float> out(kOutputs);
  EXPECT_EQ(Run(LaunchOf(input.data(), out.data())).code(), Code::kOutOfMemory);
}

TEST_F(AppleDriver, RefusesMemoryThatIsOnlyPartlyItsOwn) {
  Open();
  auto* const input = reinterpret_cast<std::byte*>(DeviceInput(1));
  float* const out = Floats(kOutputs);
  const Status behind = Run(LaunchOf(input + 400, out));
  EXPECT_EQ(behind.code(), Code::kInvalidArgument);
  EXPECT_THAT(behind.message(), HasSubstr("536 bytes at "));
  EXPECT_THAT(behind.message(), HasSubstr("not in one allocation"));
  EXPECT_EQ(Run(LaunchOf(input - 100, out)).code(), Code::kInvalidArgument);
  // In a buffer of the driver, and not allocated.
  EXPECT_EQ(Run(LaunchOf(out + 1000, input)).code(), Code::kInvalidArgument);
}

// Unaligned host memory is copied in and out, and the call blocks.
TEST_F(AppleDriver, CopiesMemoryOfTheCaller) {
  Open();
  std::vector<float> input = Input(7);
  std::vector<float> out(kOutputs + 5, -1);
  // The host writes between the rows of the output while the GPU works.
  TheBehaviour().on_run = [&] { out[kOutputs + 2] = 42; };
  ASSERT_TRUE(Run(LaunchOf(input.data(), out.data(), (kOutputs + 5) * 4)).ok());
  EXPECT_EQ(out[128], 7);
  EXPECT_EQ(out[128 + 63], 70);
  EXPECT_EQ(out[kOutputs + 1], -1);
  EXPECT_EQ(out[kOutputs + 2], 42);
  EXPECT_EQ(input, Input(7));
  EXPECT_EQ(TheLog().mapped, 0);
  // Kernels use vector loads when the caller's address is aligned: the copy keeps the alignment.
  EXPECT_EQ(TheLog().input_offset % 64, reinterpret_cast<uintptr_t>(input.data()) % 64);
  alignas(64) std::array<float, kInputs + 1> shifted{};
  ASSERT_TRUE(Run(LaunchOf(shifted.data() + 1, out.data())).ok());
  EXPECT_EQ(TheLog().input_offset % 64, 4u);
}

// The second launch reads the output of the first one; both are in host memory.
TEST_F(AppleDriver, LaunchesShareMemoryOfTheCaller) {
  Open();
  const std::vector<float> input = Input(9);
  std::vector<float> between(262);
  std::vector<float> last(kOutputs);
  const std::vector<KernelLaunch> launches = {LaunchOf(input.data(), between.data()),
                                              LaunchOf(between.data() + 128, last.data())};
  ASSERT_TRUE(driver_->Run(launches, nullptr).ok());
  EXPECT_EQ(between[128], 9);
  EXPECT_EQ(last[0], 9);
}

/// Page-aligned host memory.
class Pages {
 public:
  explicit Pages(int64_t bytes)
      : data_(aligned_alloc(kPage, static_cast<size_t>(bytes)), &std::free) {
    std::memset(data_.get(), 0, static_cast<size_t>(bytes));
  }
  float* floats() const { return static_cast<float*>(data_.get()); }

 private:
  std::unique_ptr<void, void (*)(void*)> data_;
};

TEST_F(AppleDriver, MapsWholePagesOfTheCaller) {
  Open();
  const Pages input(kPage);
  const Pages out(kPage);
  std::memcpy(input.floats(), Input(2).data(), kInputs * 4);
  KernelLaunch launch = LaunchOf(input.floats(), out.floats(), kPage);
  launch.buffers[0].bytes = kPage;
  const int64_t before = TheLog().dispatches;
  ASSERT_TRUE(Run(launch).ok());
  EXPECT_EQ(TheLog().mapped, 2);
  EXPECT_EQ(TheLog().dispatches, before);
  ASSERT_TRUE(driver_->Synchronize(nullptr).ok());
  EXPECT_EQ(out.floats()[128], 2);

  // Overlapping host memory of pending work: a later launch sees the earlier writes.
  std::memset(out.floats(), 0, kPage);
  ASSERT_TRUE(Run(launch).ok());
  std::vector<float> last(kOutputs);
  ASSERT_TRUE(Run(LaunchOf(out.floats() + 128, last.data())).ok());
  EXPECT_EQ(last[0], 2);

  // Host memory that pending work reads is not written before that work completes.
  ASSERT_TRUE(Run(launch).ok());
  const int64_t now = TheLog().dispatches;
  const Pages third(kPage);
  KernelLaunch writes = LaunchOf(third.floats(), input.floats(), kPage);
  writes.buffers[0].bytes = kPage;
  ASSERT_TRUE(Run(writes).ok());
  EXPECT_EQ(TheLog().dispatches, now + 1);
  ASSERT_TRUE(driver_->Synchronize(nullptr).ok());

  std::memcpy(input.floats(), Input(2).data(), kInputs * 4);
  TheBehaviour().maps_pages = false;  // Pages from several VM mappings.
  std::memset(out.floats(), 0, kPage);
  ASSERT_TRUE(Run(launch).ok());
  EXPECT_EQ(out.floats()[128], 2);
}

TEST_F(AppleDriver, AFailedCommandBufferLosesTheDevice) {
  Open();
  float* const input = DeviceInput(1);
  float* const out = Floats(kOutputs);
  TheBehaviour().fails_from = TheLog().command_buffers;
  EXPECT_TRUE(Run(LaunchOf(input, out)).ok());
  EXPECT_TRUE(Run(LaunchOf(input, out)).ok());  // The error is not known yet.
  const Status lost = driver_->Synchronize(nullptr);
  EXPECT_EQ(lost.code(), Code::kDeviceLost);
  EXPECT_THAT(lost.message(), HasSubstr("marlin_self_test x 2: Caused GPU Timeout Error 0"));
  EXPECT_THAT(lost.message(), HasSubstr("MTLCommandBufferError 1; faulted: command buffer "));
  EXPECT_EQ(Run(LaunchOf(input, out)).message(), lost.message());
  EXPECT_EQ(driver_->Synchronize(nullptr).message(), lost.message());
  EXPECT_EQ(driver_->Allocate(1).status().message(), lost.message());
}

TEST_F(AppleDriver, AFailureIsNoticedWithoutSynchronize) {
  Open();
  std::vector<float> input = Input(1);
  std::vector<float> out(kOutputs, -1);
  TheBehaviour().fails_from = TheLog().command_buffers;
  const Status lost = Run(LaunchOf(input.data(), out.data()));
  EXPECT_EQ(lost.code(), Code::kDeviceLost);
  EXPECT_EQ(out, std::vector<float>(kOutputs, -1));
  EXPECT_EQ(Run(LaunchOf(input.data(), out.data())).message(), lost.message());
}

TEST_F(AppleDriver, TakesQueuesOfTheCaller) {
  Open();
  float* const input = DeviceInput(4);
  float* const out = Floats(kOutputs);
  void* const queue = fake_gpu::NewQueue(false);
  void* const other = fake_gpu::NewQueue(true);
  out[128] = 0;
  EXPECT_EQ(Run(LaunchOf(input, out), other).code(), Code::kInvalidArgument);
  EXPECT_TRUE(Run(LaunchOf(input, out), queue).ok());
  EXPECT_EQ(out[128], 0);
  EXPECT_TRUE(driver_->Synchronize(queue).ok());
  EXPECT_EQ(out[128], 4);
  out[128] = 0;
  EXPECT_TRUE(Run(LaunchOf(input, out), queue).ok());
  EXPECT_TRUE(driver_->Synchronize(nullptr).ok());  // Null waits for all queues.
  EXPECT_EQ(out[128], 4);
  fake_gpu::ReleaseQueue(queue);
  fake_gpu::ReleaseQueue(other);
}

TEST_F(AppleDriver, IsThreadSafe) {
  Open();
  std::vector<std::thread> threads;
  std::array<float, 2> results{};
  for (size_t t = 0; t < results.size(); ++t) {
    threads.emplace_back([&, t] {
      const auto first = static_cast<float>(100 * t + 1);
      float* const input = DeviceInput(first);
      for (int i = 0; i < 8; ++i) {
        float* const out = Floats(kOutputs);
        std::vector<float> host(kOutputs);
        EXPECT_TRUE(Run(LaunchOf(input, out)).ok());
        EXPECT_TRUE(Run(LaunchOf(input, host.data())).ok());
        EXPECT_TRUE(driver_->Synchronize(nullptr).ok());
        results[t] = out[128] == first && host[128] == first ? first : -1;
        driver_->Free(out);
      }
      driver_->Free(input);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(results[0], 1);
  EXPECT_EQ(results[1], 101);
}

TEST_F(AppleDriver, ClosesWithWorkOnItsWay) {
  Open();
  float* const input = DeviceInput(1);
  float* const out = Floats(kOutputs);
  ASSERT_TRUE(Run(LaunchOf(input, out)).ok());
  const int64_t before = TheLog().dispatches;
  driver_.reset();
  EXPECT_EQ(TheLog().dispatches, before + 1);
}

}  // namespace
}  // namespace marlin::metal
