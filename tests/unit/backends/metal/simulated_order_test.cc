// Launches that do not do what they declare: memory that they do not name, and barriers between
// them that are missing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "simulated_experts.h"

namespace marlin::metal::simulated_order_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kSource = R"(
#include <metal_stdlib>
using namespace metal;
struct Ranges { ulong from; ulong to; };
kernel void add_one(device const uint* in [[buffer(0)]], device uint* out [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) {
  out[i] = in[i] + 1;
}
kernel void add_two(device const uint* in [[buffer(0)]], device uint* out [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) {
  out[i] = in[i] + 2;
}
kernel void copy_through_addresses(constant Ranges& ranges [[buffer(PARAMETERS)]],
                                   uint i [[thread_position_in_grid]]) {
  reinterpret_cast<device uint*>(ranges.to)[i] =
      reinterpret_cast<device const uint*>(ranges.from)[i];
}
kernel void overwrite_input(device uint* in [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  in[i] = i;
}
)";

/// A driver with kernels of the test's own.
class SimulatedOrder : public ::testing::Test {
 protected:
  void SetUp() override {
    const fs::path folder = root_ / "backends/metal/kernels";
    fs::create_directories(folder);
    std::string text = kSource;
    const std::string index = std::to_string(MARLIN_BUFFER_PARAMETERS);
    text.replace(text.find("PARAMETERS"), 10, index);
    std::ofstream(folder / "order.metal") << text;
    std::iota(input_.begin(), input_.end(), 0U);
    Open();
  }
  void TearDown() override { fs::remove_all(root_); }

  void Open(std::function<bool()> drops = nullptr, const char* seed = "0") {
    setenv("METAL_MARLIN_METAL_SIM_SOURCES", root_.c_str(), 1);
    setenv("METAL_MARLIN_METAL_SIM_SEED", seed, 1);
    auto driver = OpenSimulatedDriver(&launches_, std::move(drops));
    unsetenv("METAL_MARLIN_METAL_SIM_SOURCES");
    unsetenv("METAL_MARLIN_METAL_SIM_SEED");
    if (!driver.ok()) GTEST_SKIP() << driver.status().message();
    driver_ = std::move(*driver);
  }

  using Words = std::vector<uint32_t>;
  static KernelBuffer Read(int index, const Words& words) {
    return {index, words.data(), std::ssize(words) * 4, false, true};
  }
  static KernelBuffer Write(int index, Words& words) {
    return {index, words.data(), std::ssize(words) * 4, true, true};
  }
  static KernelLaunch Launch(std::string_view function, std::vector<KernelBuffer> buffers) {
    KernelLaunch launch;
    launch.source = "order.metal";
    launch.function = function;
    for (const KernelBuffer& buffer : buffers) launch.buffers.push_back(buffer);
    return launch;
  }
  static KernelLaunch Add(const Words& in, Words& out, std::string_view function = "add_one") {
    return Launch(function, {Read(0, in), Write(1, out)});
  }

  struct Ranges {
    uint64_t from;
    uint64_t to;
  };
  KernelLaunch Copy(const Words& from, Words& to) const {
    KernelLaunch launch = Launch("copy_through_addresses", {});
    launch.other_parameters =
        ParameterBlock(Ranges{driver_->AddressOf(from.data()), driver_->AddressOf(to.data())});
    launch.addressed = {{from.data(), std::ssize(from) * 4, false},
                        {to.data(), std::ssize(to) * 4, true}};
    return launch;
  }

  Status Run(const std::vector<KernelLaunch>& launches) const {
    return driver_->Run(launches, nullptr);
  }

  const fs::path root_ =
      fs::path(::testing::TempDir()) / ("simulated_order." + std::to_string(getpid()));
  std::vector<SimulatedLaunch> launches_;
  std::unique_ptr<Driver> driver_;
  Words input_ = Words(32);
  Words middle_ = Words(32);
  Words output_ = Words(32);
};

TEST_F(SimulatedOrder, ReachesWhatIsDeclared) {
  ASSERT_EQ(Run({Copy(input_, middle_), Add(middle_, output_)}).message(), "");
  EXPECT_EQ(output_[7], 8U);
  ASSERT_EQ(launches_.size(), 2U);
  EXPECT_EQ(launches_[0].counters.addressed_bytes_read, 128);
  EXPECT_EQ(launches_[0].counters.addressed_bytes_written, 128);
}

TEST_F(SimulatedOrder, FindsMemoryThatIsNotDeclared) {
  KernelLaunch launch = Copy(input_, middle_);
  launch.addressed.erase(launch.addressed.begin());
  EXPECT_THAT(Run({launch}).message(),
              AllOf(HasSubstr("copy_through_addresses: order.metal:1"), HasSubstr("wild access")));
  launch = Copy(input_, middle_);
  launch.addressed[1].bytes -= 4;
  EXPECT_THAT(Run({launch}).message(),
              AllOf(HasSubstr("copy_through_addresses"), HasSubstr("belongs to no buffer")));
  launch = Copy(input_, middle_);
  launch.addressed[1].written = false;
  EXPECT_THAT(Run({launch}).message(),
              AllOf(HasSubstr("copy_through_addresses"), HasSubstr("write to read-only memory")));
  EXPECT_THAT(Run({Launch("overwrite_input", {Read(0, input_)})}).message(),
              AllOf(HasSubstr("overwrite_input"), HasSubstr("write to read-only memory")));
}

TEST_F(SimulatedOrder, NothingWritesWeightsThatMayBeRead) {
  KernelLaunch reads = Copy(input_, output_);
  const MemoryRange weights[] = {{input_.data(), 128}};
  reads.reached = driver_->Reach(weights);
  reads.addressed.erase(reads.addressed.begin());
  const KernelLaunch writes = Launch("overwrite_input", {Write(0, input_)});
  EXPECT_THAT(Run({reads, writes}).message(),
              AllOf(HasSubstr("overwrite_input"), HasSubstr("copy_through_addresses")));
  ASSERT_TRUE(driver_->Synchronize(nullptr).ok());
  EXPECT_EQ(Run({writes}).message(), "");
  // Their owner has freed them.
  ASSERT_EQ(Run({reads}).message(), "");
  reads.reached.reset();
  EXPECT_EQ(Run({writes}).message(), "");
}

// Every way in which two launches can share memory, each with its barrier left out.
TEST_F(SimulatedOrder, FindsEveryMissingBarrier) {
  Words third(32);
  const std::vector<std::vector<KernelLaunch>> pairs = {
      {Add(input_, middle_), Add(middle_, output_, "add_two")},
      {Add(middle_, output_), Add(input_, middle_, "add_two")},
      {Add(input_, output_), Add(middle_, output_, "add_two")},
      {Copy(input_, middle_), Add(middle_, output_, "add_two")},
      {Add(middle_, output_), Copy(input_, middle_)},
      {Copy(input_, middle_), Copy(middle_, output_)},
      {Copy(middle_, output_), Copy(input_, middle_)},
      {Copy(input_, output_), Copy(middle_, output_)},
      {Add(input_, middle_), Add(input_, third), Add(middle_, output_, "add_two")},
      {Launch("overwrite_input", {Write(0, input_)}), Add(input_, middle_, "add_two")},
  };
  for (const std::vector<KernelLaunch>& launches : pairs) {
    Open();
    EXPECT_EQ(Run(launches).message(), "");
    Open([] { return true; });
    const std::string last(launches.back().function);
    EXPECT_THAT(Run(launches).message(), AllOf(HasSubstr("missing barrier"), HasSubstr(last),
                                               HasSubstr(std::string(launches.front().function))));
  }
  // Also between calls, but not across a wait.
  Open([] { return true; });
  EXPECT_EQ(Run({pairs[0][0]}).message(), "");
  EXPECT_THAT(Run({pairs[0][1]}).message(), HasSubstr("missing barrier"));
  Open([] { return true; });
  EXPECT_EQ(Run({pairs[0][0]}).message(), "");
  ASSERT_TRUE(driver_->Synchronize(nullptr).ok());
  EXPECT_EQ(Run({pairs[0][1]}).message(), "");
}

TEST_F(SimulatedOrder, ASeedChangesTheOrderButForBarriers) {
  std::vector<Words> outputs(12, Words(32));
  for (const char* const seed : {"1", "2"}) {
    Open(nullptr, seed);
    std::vector<KernelLaunch> launches = {Add(input_, middle_)};
    for (Words& output : outputs) launches.push_back(Add(middle_, output, "add_two"));
    ASSERT_EQ(Run(launches).message(), "");
    for (const Words& output : outputs) EXPECT_EQ(output[5], 8U);
    EXPECT_EQ(launches_.front().function, "add_one");
    launches_.clear();
  }
}

/// The real kernels: each barrier of a layer of experts left out, one at a time.
class SimulatedExpertsOrder : public SimulatedExperts {
 protected:
  static inline int drops_at = -1;
  static inline int seen = 0;

  static void SetUpTestSuite() {
    auto driver = OpenSimulatedDriver(&launches_, [] { return seen++ == drops_at; });
    opened_ = driver.status();
    if (!opened_.ok()) return;
    device_ = Internals::Make<Device>(
        std::make_shared<Device::Impl>(MakeMetalBackend(std::move(*driver))));
  }

  Status RunWithout(int barrier, const Layer& layer, const Batch& batch) {
    EXPECT_TRUE(device_->Synchronize().ok());
    drops_at = barrier;
    seen = 0;
    std::vector<float> out;
    return TryRun(layer, batch, ProblemOf(batch), &out);
  }
};

TEST_F(SimulatedExpertsOrder, NeedTheirBarriers) {
  Layer layer = MakeLayer({.biased = true, .shared = true, .shared_gate = true});
  MakeSet(&layer);
  // Experts of few tokens take two launches; others are sorted first. Then there are barriers that
  // nothing needs: launches for few and for many rows write parts of one range.
  for (const auto& [tokens, least] : {std::pair{1, 1}, {33, 2}}) {
    const Batch batch = MakeBatch(layer, tokens, 2);
    ASSERT_EQ(RunWithout(-1, layer, batch).message(), "");
    const int barriers = seen;
    int missed = 0;
    for (int i = 0; i < barriers; ++i) {
      const std::string message = RunWithout(i, layer, batch).message();
      if (message.empty()) continue;
      EXPECT_THAT(message, HasSubstr("missing barrier")) << i;
      ++missed;
    }
    EXPECT_GE(missed, least);
  }
}

}  // namespace
}  // namespace marlin::metal::simulated_order_test
