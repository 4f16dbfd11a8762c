// Placed experts: the sums of a device and of the CPU against those of all experts on one device.
#include "marlin/expert_placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../engine/remote_backend.h"
#include "base/scalars.h"
#include "device_test.h"
#include "marlin/quantize.h"

namespace marlin::expert_placement_test {
namespace {

constexpr int64_t kHidden = 160;
constexpr int64_t kInner = 96;
constexpr int64_t kExperts = 6;
constexpr int64_t kTopK = 3;

std::string Message(const Status& status) {
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  return std::string(status.message());
}

/// Integers in [-1, 1], or floats.
std::vector<float> Values(int64_t count, uint32_t seed, bool integers) {
  std::mt19937 random(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    const auto bits = static_cast<uint32_t>(random());
    value = integers ? static_cast<float>(bits % 3) - 1 : static_cast<float>(bits) * 0x1p-31F - 1;
  }
  return values;
}

struct MatrixOptions {
  bool integers = false;
  int64_t hidden = kHidden;
};

ExpertMatrix MakeMatrix(const Device& device, int64_t k, int64_t n, uint32_t seed, bool integers) {
  const std::vector<float> values = Values(k * n, seed, integers);
  QuantizeOptions options{.format = Format::kFp4E2M1, .group_size = 32};
  if (integers) options = {.format = Format::kBf16};
  const auto quantized = Quantize({values.data(), DType::kF32, {k, n}}, options);
  EXPECT_TRUE(quantized.ok()) << quantized.status().message();
  return {*Prepare(*quantized, device), 0, {}};
}

/// The same expert on every device.
Expert MakeExpert(const Device& device, uint32_t seed, const MatrixOptions& options = {}) {
  const int64_t inner = options.integers ? 16 : kInner;
  return {MakeMatrix(device, options.hidden, 2 * inner, seed, options.integers),
          {},
          MakeMatrix(device, inner, options.hidden, seed + 1, options.integers)};
}

/// The experts of a layer, prepared for one device.
struct Side {
  Device device;
  std::vector<Expert> experts;
  SharedExpert shared;

  Side(const Device& on, const MatrixOptions& options = {}) : device(on) {
    for (uint32_t e = 0; e < kExperts; ++e) experts.push_back(MakeExpert(on, 10 * e + 1, options));
    shared.expert = MakeExpert(on, 1000, options);
  }

  /// The set of those experts that are given.
  ExpertSet Set(const std::vector<int64_t>& here, bool with_shared = false) const {
    std::vector<Expert> some(experts.size());
    for (const int64_t e : here) some[static_cast<size_t>(e)] = experts[static_cast<size_t>(e)];
    const auto set = ExpertSet::Make(device, some, with_shared ? shared : SharedExpert());
    EXPECT_TRUE(set.ok()) << set.status().message();
    return *set;
  }
  ExpertSet All(bool with_shared = false) const { return Set({0, 1, 2, 3, 4, 5}, with_shared); }
};

std::vector<int64_t> AllBut(const std::vector<int64_t>& some) {
  std::vector<int64_t> others;
  for (int64_t e = 0; e < kExperts; ++e) {
    if (std::find(some.begin(), some.end(), e) == some.end()) others.push_back(e);
  }
  return others;
}

struct Batch {
  int64_t tokens = 0;
  std::vector<float> x;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Batch MakeBatch(int64_t tokens, uint32_t seed, bool integers = false) {
  Batch batch{tokens,
              Values(tokens * kHidden, seed, integers),
              {},
              Values(tokens * kTopK, seed + 1, integers)};
  std::mt19937 random(seed);
  for (float& value : batch.x) {
    // Sparse rows keep integers small enough for bf16.
    if (integers) value = random() % 40 == 0 ? 1.0F : 0.0F;
    value = Bf16ToFloat(FloatToBf16(value));
  }
  std::vector<int32_t> order = {0, 1, 2, 3, 4, 5};
  for (int64_t t = 0; t < tokens; ++t) {
    std::shuffle(order.begin(), order.end(), random);
    batch.ids.insert(batch.ids.end(), order.begin(), order.begin() + kTopK);
  }
  return batch;
}

ExpertsProblem ProblemOf(const Batch& batch) {
  ExpertsProblem problem;
  problem.tokens = batch.tokens;
  problem.top_k = kTopK;
  problem.x_type = DType::kF32;
  problem.out_type = DType::kF32;
  return problem;
}

template <typename T>
DeviceBuffer Uploaded(const Device& device, const std::vector<T>& values) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
  DeviceBuffer buffer = *DeviceBuffer::Allocate(device, bytes);
  EXPECT_TRUE(buffer.CopyFrom(values.data(), bytes).ok());
  return buffer;
}

/// A batch in device memory.
struct Operands {
  Device device;
  ExpertsProblem problem;
  DeviceBuffer x;
  DeviceBuffer ids;
  DeviceBuffer weights;
  DeviceBuffer out;

  Operands(const Device& on, const Batch& batch, const ExpertsProblem& of)
      : device(on),
        problem(of),
        ids(Uploaded(on, batch.ids)),
        weights(Uploaded(on, batch.weights)) {
    if (of.x_type == DType::kF32) {
      x = Uploaded(on, batch.x);
    } else {
      std::vector<uint16_t> rounded;
      for (const float value : batch.x) rounded.push_back(FloatToBf16(value));
      x = Uploaded(on, rounded);
    }
    out = Uploaded(on, std::vector<float>(batch.x.size(), -7.0F));
  }

  Status Run(const ExpertsPlan& plan) const {
    const Shape rows{problem.tokens, kHidden};
    const Shape selections{problem.tokens, kTopK};
    return plan.Run({x.data(), problem.x_type, rows}, {ids.data(), DType::kI32, selections},
                    {weights.data(), DType::kF32, selections},
                    {out.data(), problem.out_type, rows});
  }
  /// The result, widened.
  std::vector<float> Result() const {
    std::vector<float> values(static_cast<size_t>(problem.tokens * kHidden));
    std::vector<uint16_t> halves(values.size());
    EXPECT_TRUE(device.Synchronize().ok());
    if (problem.out_type == DType::kF32) {
      EXPECT_TRUE(out.CopyTo(values.data(), static_cast<int64_t>(values.size() * 4)).ok());
      return values;
    }
    EXPECT_TRUE(out.CopyTo(halves.data(), static_cast<int64_t>(halves.size() * 2)).ok());
    for (size_t i = 0; i < values.size(); ++i) values[i] = Bf16ToFloat(halves[i]);
    return values;
  }
};

/// Runs experts of either kind.
template <typename Experts>
std::vector<float> RunExperts(const Device& device, const Experts& experts, const Batch& batch,
                              const ExpertsProblem& problem) {
  const Operands operands(device, batch, problem);
  const auto plan = PlanExperts(device, problem, experts);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  if (!plan.ok()) return {};
  const Status status = operands.Run(*plan);
  EXPECT_TRUE(status.ok()) << status.message();
  return operands.Result();
}

void ExpectClose(const std::vector<float>& out, const std::vector<float>& expected,
                 float tolerance) {
  ASSERT_EQ(out.size(), expected.size());
  float largest = 0;
  for (const float value : expected) largest = std::max(largest, std::fabs(value));
  for (size_t i = 0; i < out.size(); ++i) {
    ASSERT_NEAR(out[i], expected[i], tolerance * largest) << i;
  }
}

/// Equal, with the bits of zeros and NaNs.
void ExpectSameBits(const std::vector<float>& out, const std::vector<float>& expected) {
  ASSERT_EQ(out.size(), expected.size());
  for (size_t i = 0; i < out.size(); ++i) {
    uint32_t bits[2];
    std::memcpy(&bits[0], &out[i], 4);
    std::memcpy(&bits[1], &expected[i], 4);
    ASSERT_EQ(bits[0], bits[1]) << i << ": " << out[i] << " and " << expected[i];
  }
}

class Placement : public testing::DeviceTest {
 protected:
  Placement() : DeviceTest(OpenSide) {}

  static Result<Device> OpenSide(const std::string& name) {
    if (name == "remote") return testing::OpenRemote({.plans_experts = true});
    return testing::OpenByName(name);
  }
  /// Experts for the host to have, in turn. To the simulator's kernels, which take seconds, it is
  /// the same which experts are where.
  static std::vector<std::vector<int64_t>> HostSides(int64_t tokens) {
    if (GetParam() == "metal-sim" && tokens > 1) return {{0, 2, 3}};
    return {{5}, {0, 2, 3}, {1, 2, 3, 4, 5}};
  }
  static PlacedExperts Place(const Side& device, const Side& host,
                             const std::vector<int64_t>& on_host, bool with_shared = false) {
    const auto placed =
        PlacedExperts::Make(device.Set(AllBut(on_host), with_shared), host.Set(on_host));
    EXPECT_TRUE(placed.ok()) << placed.status().message();
    return *placed;
  }

  const Device host_ = *Device::Open("cpu", {.threads = 2});
};

TEST_P(Placement, IsExactOnIntegers) {
  // Every order of the sums gives the same number, so a wrong, missing or doubled term shows.
  const MatrixOptions integers{.integers = true};
  const Side here(device_, integers);
  const Side there(host_, integers);
  for (const int64_t tokens : {int64_t{1}, int64_t{7}, int64_t{33}}) {
    const Batch batch = MakeBatch(tokens, 13, true);
    ExpertsProblem problem = ProblemOf(batch);
    problem.gate.activation = Activation::kRelu;
    for (const bool shared : {false, true}) {
      const std::vector<float> expected = RunExperts(device_, here.All(shared), batch, problem);
      for (const std::vector<int64_t>& on_host : HostSides(tokens)) {
        const PlacedExperts placed = Place(here, there, on_host, shared);
        EXPECT_EQ(placed.count(), kExperts);
        EXPECT_EQ(placed.device_count(), kExperts - static_cast<int64_t>(on_host.size()));
        EXPECT_EQ(placed.hidden(), kHidden);
        EXPECT_EQ(RunExperts(device_, placed, batch, problem), expected)
            << tokens << " tokens, " << on_host.size() << " experts on the host";
      }
    }
  }
}

TEST_P(Placement, IsCloseToOneDevice) {
  const Side here(device_);
  const Side there(host_);
  for (const int64_t tokens : {int64_t{1}, int64_t{5}, int64_t{40}}) {
    const Batch batch = MakeBatch(tokens, 77);
    ExpertsProblem problem = ProblemOf(batch);
    ExpertsProblem exact = problem;
    exact.accuracy = Accuracy::kExact;
    exact.allow_bf16_activations = false;
    ExpertsProblem halves = problem;
    halves.x_type = DType::kBf16;
    halves.out_type = DType::kBf16;
    const std::vector<float> expected = RunExperts(host_, there.All(true), batch, exact);
    for (const std::vector<int64_t>& on_host : HostSides(tokens)) {
      const PlacedExperts placed = Place(here, there, on_host, true);
      ExpectClose(RunExperts(device_, placed, batch, exact), expected, 0x1p-18F);
      ExpectClose(RunExperts(device_, placed, batch, problem), expected, 0x1p-6F);
      ExpectClose(RunExperts(device_, placed, batch, halves), expected, 0x1p-6F);
    }
  }
}

TEST_P(Placement, OnOneSideIsThatSide) {
  const Side here(device_);
  const Side there(host_);
  const Batch batch = MakeBatch(9, 5);
  for (const DType type : {DType::kF32, DType::kBf16}) {
    ExpertsProblem problem = ProblemOf(batch);
    problem.x_type = type;
    problem.out_type = type;
    const PlacedExperts all_here = Place(here, there, {}, true);
    ExpectSameBits(RunExperts(device_, all_here, batch, problem),
                   RunExperts(device_, here.All(true), batch, problem));
    EXPECT_EQ(all_here.statistics(), PlacementStatistics());
    const PlacedExperts all_there = Place(here, there, {0, 1, 2, 3, 4, 5});
    EXPECT_EQ(all_there.device_count(), 0);
    ExpectSameBits(RunExperts(device_, all_there, batch, problem),
                   RunExperts(host_, there.All(), batch, problem));
  }
}

TEST_P(Placement, KeepsTheSharedExpertWithoutOthersOnTheDevice) {
  const Side here(device_);
  const Side there(host_);
  const Batch batch = MakeBatch(4, 6);
  ExpertsProblem problem = ProblemOf(batch);
  problem.accuracy = Accuracy::kExact;
  const PlacedExperts placed = Place(here, there, {0, 1, 2, 3, 4, 5}, true);
  ExpectClose(RunExperts(device_, placed, batch, problem),
              RunExperts(host_, there.All(true), batch, problem), 0x1p-18F);
}

TEST_P(Placement, WithoutSelectionsOfTheHostIsTheDevice) {
  const Side here(device_);
  const Side there(host_);
  Batch batch = MakeBatch(6, 7);
  for (int32_t& id : batch.ids) id %= 4;
  const ExpertsProblem problem = ProblemOf(batch);
  const PlacedExperts placed = Place(here, there, {4, 5}, true);
  ExpectSameBits(RunExperts(device_, placed, batch, problem),
                 RunExperts(device_, here.All(true), batch, problem));
  EXPECT_EQ(placed.statistics(), (PlacementStatistics{1, 6 * kTopK, 0, 0}));
}

TEST_P(Placement, CountsTheSelectionsOfBothSides) {
  const Side here(device_);
  const Side there(host_);
  Batch batch = MakeBatch(3, 8);
  batch.ids = {0, 1, 2, 5, 4, 0, 1, 2, 4};
  const PlacedExperts placed = Place(here, there, {4, 5});
  const PlacedExperts copy = placed;
  RunExperts(device_, placed, batch, ProblemOf(batch));
  EXPECT_EQ(copy.statistics(), (PlacementStatistics{1, 6, 3, 2}));
  RunExperts(device_, placed, batch, ProblemOf(batch));
  EXPECT_EQ(copy.statistics(), (PlacementStatistics{2, 12, 6, 4}));
}

TEST_P(Placement, ReadsAndWritesRowsWithStrides) {
  const Side here(device_);
  const Side there(host_);
  const Batch batch = MakeBatch(6, 9);
  const PlacedExperts placed = Place(here, there, {0, 2, 3});
  const ExpertsProblem problem = ProblemOf(batch);
  const std::vector<float> expected = RunExperts(device_, placed, batch, problem);
  constexpr int64_t kStride = kHidden + 8;
  std::vector<float> wide(static_cast<size_t>(batch.tokens * kStride), 1e30F);
  for (int64_t t = 0; t < batch.tokens; ++t) {
    std::copy_n(batch.x.begin() + t * kHidden, kHidden, wide.begin() + t * kStride);
  }
  const DeviceBuffer x = Uploaded(device_, wide);
  const DeviceBuffer out = Uploaded(device_, wide);
  const Operands operands(device_, batch, problem);
  const ExpertsPlan plan = *PlanExperts(device_, problem, placed);
  const DeviceBuffer workspace = *DeviceBuffer::Allocate(device_, plan.workspace_bytes());
  ExpertsArguments arguments;
  arguments.workspace = workspace.data();
  arguments.workspace_bytes = workspace.bytes();
  const Shape rows{batch.tokens, kHidden};
  const Shape selections{batch.tokens, kTopK};
  const Status status = plan.Run({x.data(), DType::kF32, rows, {kStride, 1}},
                                 {operands.ids.data(), DType::kI32, selections},
                                 {operands.weights.data(), DType::kF32, selections},
                                 {out.data(), DType::kF32, rows, {kStride, 1}}, arguments);
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_TRUE(device_.Synchronize().ok());
  ASSERT_TRUE(out.CopyTo(wide.data(), out.bytes()).ok());
  for (int64_t t = 0; t < batch.tokens; ++t) {
    for (int64_t i = 0; i < kStride; ++i) {
      const float wanted = i < kHidden ? expected[static_cast<size_t>(t * kHidden + i)] : 1e30F;
      ASSERT_EQ(wide[static_cast<size_t>(t * kStride + i)], wanted) << t << " " << i;
    }
  }
}

TEST_P(Placement, KeepsAPoisonedRowToItself) {
  const Side here(device_);
  const Side there(host_);
  Batch batch = MakeBatch(8, 10);
  const PlacedExperts placed = Place(here, there, {0, 2, 3});
  const ExpertsProblem problem = ProblemOf(batch);
  const std::vector<float> clean = RunExperts(device_, placed, batch, problem);
  batch.x[3 * kHidden + 5] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> poisoned = RunExperts(device_, placed, batch, problem);
  for (size_t i = 0; i < clean.size(); ++i) {
    const bool own = static_cast<int64_t>(i) / kHidden == 3;
    ASSERT_EQ(std::isnan(poisoned[i]), own) << i;
    if (!own) {
      ASSERT_EQ(poisoned[i], clean[i]) << i;
    }
  }
}

TEST_P(Placement, IsDeterministicAndBatchInvariantWhenAsked) {
  const Side here(device_);
  const Side there(host_);
  const Batch batch = MakeBatch(21, 11);
  const PlacedExperts placed = Place(here, there, {1, 4});
  ExpertsProblem problem = ProblemOf(batch);
  const std::vector<float> first = RunExperts(device_, placed, batch, problem);
  for (int i = 0; i < 3; ++i) ExpectSameBits(RunExperts(device_, placed, batch, problem), first);
  problem.determinism = Determinism::kBatchInvariant;
  const std::vector<float> all = RunExperts(device_, placed, batch, problem);
  problem.tokens = 1;
  // The simulator takes seconds for what other devices do in milliseconds.
  const int64_t step = GetParam() == "metal-sim" ? 10 : 4;
  for (int64_t t = 0; t < batch.tokens; t += step) {
    Batch one{1, {}, {}, {}};
    one.x.assign(batch.x.begin() + t * kHidden, batch.x.begin() + (t + 1) * kHidden);
    one.ids.assign(batch.ids.begin() + kTopK * t, batch.ids.begin() + kTopK * (t + 1));
    one.weights.assign(batch.weights.begin() + kTopK * t, batch.weights.begin() + kTopK * (t + 1));
    const std::vector<float> alone = RunExperts(device_, placed, one, problem);
    ExpectSameBits(alone, {all.begin() + t * kHidden, all.begin() + (t + 1) * kHidden});
  }
}

TEST_P(Placement, MovesExpertsBetweenStepsWhileOldPlansLive) {
  const Side here(device_);
  const Side there(host_);
  const Batch batch = MakeBatch(5, 12);
  const ExpertsProblem problem = ProblemOf(batch);
  PlacedExperts placed = Place(here, there, {0, 1});
  const std::vector<float> before = RunExperts(device_, placed, batch, problem);
  const ExpertsPlan old = *PlanExperts(device_, problem, placed);
  placed = Place(here, there, {2, 3});
  ExpectClose(RunExperts(device_, placed, batch, problem), before, 0x1p-6F);
  EXPECT_EQ(placed.statistics().runs, 1);
  const Operands operands(device_, batch, problem);
  ASSERT_TRUE(operands.Run(old).ok());
  ExpectSameBits(operands.Result(), before);
}

TEST_P(Placement, RunsOnSeveralThreads) {
  const Side here(device_);
  const Side there(host_);
  const Batch batch = MakeBatch(5, 14);
  const ExpertsProblem problem = ProblemOf(batch);
  const PlacedExperts placed = Place(here, there, {0, 1});
  const std::vector<float> expected = RunExperts(device_, placed, batch, problem);
  const int rounds = GetParam() == "metal-sim" ? 1 : 3;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < rounds; ++j) {
        EXPECT_EQ(RunExperts(device_, placed, batch, problem), expected);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(placed.statistics().runs, 1 + 3 * rounds);
}

TEST_P(Placement, RefusesIdsThatAreNoExpert) {
  const Side here(device_);
  const Side there(host_);
  for (const int32_t id : {-1, 6}) {
    const Device device = *OpenSide(GetParam());
    const Side fresh(device);
    Batch batch = MakeBatch(3, 15);
    batch.ids[4] = id;
    const ExpertsProblem problem = ProblemOf(batch);
    const PlacedExperts placed = Place(fresh, there, {0, 1});
    const Operands operands(device, batch, problem);
    EXPECT_EQ(Message(operands.Run(*PlanExperts(device, problem, placed))),
              "ids: token 1, selection 1: " + std::to_string(id) + " is not in 0..5");
    EXPECT_EQ(placed.statistics(), PlacementStatistics());
  }
}

TEST_P(Placement, WithoutTokensDoesNothing) {
  const Side here(device_);
  const Side there(host_);
  const PlacedExperts placed = Place(here, there, {0});
  const Batch batch = MakeBatch(0, 2);
  EXPECT_TRUE(RunExperts(device_, placed, batch, ProblemOf(batch)).empty());
  EXPECT_EQ(placed.statistics().runs, 0);
}

INSTANTIATE_TEST_SUITE_P(Devices, Placement, ::testing::Values("cpu", "metal-sim", "remote"),
                         [](const auto& test) {
                           return test.param == "cpu"         ? std::string("Cpu")
                                  : test.param == "metal-sim" ? std::string("MetalSimulator")
                                                              : std::string("Remote");
                         });

TEST(WrongPlacement, IsRefusedByName) {
  const Device device = *Device::Open("cpu", {.threads = 1});
  const Device host = *Device::Open("cpu", {.threads = 1});
  const Side here(device);
  const Side there(host);
  const ExpertSet most = here.Set({0, 1, 2, 3});
  const auto make = [](const ExpertSet& on_device, const ExpertSet& on_host) {
    return Message(PlacedExperts::Make(on_device, on_host).status());
  };
  EXPECT_EQ(make({}, there.All()), "on_device: an empty set");
  EXPECT_EQ(make(most, {}), "on_host: an empty set");
  EXPECT_EQ(make(most, there.Set({3, 4, 5})), "expert 3: expected on_device or on_host, got both");
  EXPECT_EQ(make(most, there.Set({5})), "expert 4: expected on_device or on_host, got neither");
  const std::vector<Expert> two = {Expert(), there.experts[0]};
  EXPECT_EQ(make(most, *ExpertSet::Make(host, two)),
            "on_host: expected 6 experts as on_device, got 2");
  EXPECT_EQ(make(most, there.Set({4, 5}, true)),
            "on_host: expected no shared expert, which belongs on_device");
  const Side narrow(host, {.hidden = 128});
  EXPECT_EQ(make(most, narrow.Set({4, 5})),
            "on_host: expected 160 hidden features as on_device, got 128");
  const Device remote = testing::OpenRemote({.plans_experts = true});
  const Side far(remote);
  EXPECT_EQ(make(most, far.Set({4, 5})), "on_host: expected experts of the cpu, got remote");

  const PlacedExperts placed = *PlacedExperts::Make(most, there.Set({4, 5}));
  const auto plan = [&](const Device& on, const ExpertsProblem& problem, const PlacedExperts& of) {
    return Message(PlanExperts(on, problem, of).status());
  };
  EXPECT_EQ(plan(host, {1, 1}, placed), "experts: placed on another device");
  EXPECT_EQ(plan(device, {1, 1}, PlacedExperts()), "experts: an empty placement");
  EXPECT_EQ(plan(device, {-1, 1}, placed), "tokens: expected 0 or more, got -1");
  EXPECT_EQ(plan(device, {1, 0}, placed), "top_k: expected 1 or more, got 0");
  ExpertsProblem problem{1, 1};
  problem.out_type = DType::kI32;
  EXPECT_NE(plan(device, problem, placed).find("out_type: "), std::string::npos);
  EXPECT_EQ(PlacedExperts().count(), 0);
  EXPECT_EQ(PlacedExperts().device_count(), 0);
  EXPECT_EQ(PlacedExperts().hidden(), 0);
  EXPECT_EQ(PlacedExperts().statistics(), PlacementStatistics());
}

TEST(DeviceExperts, AreThoseSelectedMost) {
  const std::vector<int64_t> counts = {3, 9, 0, 9, 3};
  const auto choose = [&](int64_t experts) { return *ChooseDeviceExperts(counts, experts); };
  EXPECT_EQ(choose(0), std::vector<int64_t>());
  EXPECT_EQ(choose(1), std::vector<int64_t>({1}));
  EXPECT_EQ(choose(3), std::vector<int64_t>({0, 1, 3}));
  EXPECT_EQ(choose(5), std::vector<int64_t>({0, 1, 2, 3, 4}));
  EXPECT_EQ(Message(ChooseDeviceExperts(counts, 6).status()), "experts: expected 0..5, got 6");
  EXPECT_EQ(Message(ChooseDeviceExperts(counts, -1).status()), "experts: expected 0..5, got -1");
  const std::vector<int64_t> wrong = {1, -2};
  EXPECT_EQ(Message(ChooseDeviceExperts(wrong, 1).status()),
            "counts: expected 0 or more, got -2 for expert 1");
}

TEST(DeviceExperts, FitABudgetOverAllLayers) {
  using Lists = std::vector<std::vector<int64_t>>;
  RoutingFrequencies frequencies;
  frequencies.layers = {{1, {4, 8, 1, 4}}, {3, {0, 17, 8, 2}}};
  // Selections per byte: layer 1 has 0.4, 0.8, 0.1, 0.4 and layer 3 has 0, 0.85, 0.4, 0.1.
  const std::vector<int64_t> bytes = {10, 20};
  const auto choose = [&](int64_t budget) {
    return *ChooseDeviceExperts(frequencies, bytes, budget);
  };
  EXPECT_EQ(choose(0), Lists({{}, {}}));
  EXPECT_EQ(choose(19), Lists({{1}, {}}));  // The best one does not fit.
  EXPECT_EQ(choose(30), Lists({{1}, {1}}));
  EXPECT_EQ(choose(50), Lists({{0, 1, 3}, {1}}));  // Ties: the lower layer first.
  EXPECT_EQ(choose(70), Lists({{0, 1, 3}, {1, 2}}));
  EXPECT_EQ(choose(120), Lists({{0, 1, 2, 3}, {0, 1, 2, 3}}));
  const auto refuse = [&](const std::vector<int64_t>& sizes, int64_t budget) {
    return Message(ChooseDeviceExperts(frequencies, sizes, budget).status());
  };
  EXPECT_EQ(refuse({10}, 1), "expert_bytes: expected 2 (layers), got 1");
  EXPECT_EQ(refuse({10, 0}, 1), "expert_bytes: expected 1 or more, got 0 for layer 3");
  EXPECT_EQ(refuse(bytes, -1), "budget_bytes: expected 0 or more, got -1");
  frequencies.layers[1].counts[2] = -1;
  EXPECT_EQ(refuse(bytes, 1), "layer 3: counts: expected 0 or more, got -1 for expert 2");
}

}  // namespace
}  // namespace marlin::expert_placement_test
