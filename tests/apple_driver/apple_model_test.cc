// A model on Device::Open("metal") with the fake GPU, which runs nothing until the host waits:
// results that the model reads without waiting would be missing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "../source_directory.h"
#include "fake_gpu.h"
#include "marlin/decoder.h"
#include "marlin/device.h"
#include "marlin/model.h"

namespace marlin {
namespace {

using fake_gpu::TheLog;

class AppleModel : public testing::Test {
 protected:
  void SetUp() override {
    fake_gpu::Reset();
    ASSERT_EQ(setenv("MARLIN_METAL_SELF_TEST", "probe", 1), 0);
  }
  void TearDown() override { ASSERT_EQ(unsetenv("MARLIN_METAL_SELF_TEST"), 0); }

  static std::optional<Model> OpenModel(const char* device_name) {
    const Result<Device> device = Device::Open(device_name);
    EXPECT_TRUE(device.ok()) << device.status().message();
    if (!device.ok()) return std::nullopt;
    Result<Model> model = Model::Open(SourceDirectory() + "/examples/tiny-qwen3-moe", *device, {});
    EXPECT_TRUE(model.ok()) << model.status().message();
    if (!model.ok()) return std::nullopt;
    return *std::move(model);
  }

  /// One row of logits, on whole pages or shifted off them.
  struct alignas(4096) Logits {
    std::array<float, 1024> aligned;
    std::array<float, 1024 + 1> room;
    MutableTensorView row() { return {aligned.data(), DType::kF32, {1, 1024}}; }
    MutableTensorView shifted_row() { return {room.data() + 1, DType::kF32, {1, 1024}}; }
  };

  static void Forward(const Model& model, Sequence& sequence, std::span<const int32_t> tokens,
                      const MutableTensorView& logits) {
    const SequenceInput input{&sequence, tokens, false};
    const Status status = model.Forward({&input, 1}, logits);
    ASSERT_TRUE(status.ok()) << status.message();
  }
};

constexpr std::array<int32_t, 3> kPrompt = {17, 4, 301};

// A list costs no self-test; a device that is opened for work is tested.
TEST_F(AppleModel, ListsWithoutASelfTest) {
  const std::vector<DeviceInfo> devices = ListDevices();
  ASSERT_FALSE(devices.empty());
  const DeviceInfo& metal = devices.back();
  EXPECT_EQ(metal.name, "metal");
  EXPECT_EQ(metal.model, "Apple M2");
  EXPECT_THAT(metal.features, testing::Contains("tested when it is opened for work"));
  EXPECT_TRUE(std::all_of(metal.kernels.begin(), metal.kernels.end(),
                          [](const KernelInfo& kernel) { return kernel.available; }));
  EXPECT_EQ(TheLog().dispatches, 0);
  EXPECT_EQ(TheLog().sources, 0);
  const Result<Device> opened = Device::Open("metal");
  ASSERT_TRUE(opened.ok());
  EXPECT_THAT(opened->info().features, testing::Contains("known matrix fragments"));
}

TEST_F(AppleModel, LogitsAreThereWhenForwardReturns) {
  const std::optional<Model> expected_model = OpenModel("metal-sim");
  const std::optional<Model> model = OpenModel("metal");
  ASSERT_TRUE(expected_model && model);
  Sequence expected_sequence = *expected_model->NewSequence();
  Sequence sequence = *model->NewSequence();
  Logits expected{};
  Forward(*expected_model, expected_sequence, kPrompt, expected.row());

  Logits logits{};
  Forward(*model, sequence, kPrompt, logits.row());
  EXPECT_EQ(logits.aligned, expected.aligned);
}

// All memory of a pass is the driver's: it maps and copies nothing of the caller's.
TEST_F(AppleModel, KernelsUseMemoryOfTheDevice) {
  const std::optional<Model> model = OpenModel("metal");
  ASSERT_TRUE(model);
  Sequence sequence = *model->NewSequence();
  Logits logits{};
  Forward(*model, sequence, kPrompt, logits.shifted_row());  // Allocates the activations.
  const int64_t buffers = TheLog().buffers;
  Forward(*model, sequence, std::array<int32_t, 1>{5}, logits.shifted_row());
  EXPECT_EQ(TheLog().buffers, buffers);
  EXPECT_EQ(TheLog().mapped, 0);
}

/// Decodes greedily after a prompt.
class Text {
 public:
  explicit Text(const Model& model) : model_(model), sequence_(*model.NewSequence()) {
    const int64_t vocab = model.info().vocab_size;
    const int64_t bytes = *SamplerStateBytes(model.device(), vocab);
    memory_ = *DeviceBuffer::Allocate(model.device(), bytes);
    state_ = {memory_.data(), DType::kU8, {1, bytes}};
    const Status reset = ResetSampler(model.device(), {}, vocab, {nullptr, DType::kI32, {0}},
                                      {memory_.data(), DType::kU8, {bytes}});
    EXPECT_TRUE(reset.ok()) << reset.message();
    Feed(kPrompt);
  }

  void Feed(std::span<const int32_t> tokens) {
    const SequenceInput input{&sequence_, tokens};
    const Status status = model_.ForwardAndSample({&input, 1}, state_, {&next_, 1});
    ASSERT_TRUE(status.ok()) << status.message();
  }
  void Step() { Feed(std::array<int32_t, 1>{next_}); }
  std::vector<int32_t> Decode(int64_t steps) {
    const DecodeInput input{&sequence_, next_};
    std::vector<int32_t> tokens(static_cast<size_t>(steps));
    int64_t count = 0;
    const Status status = model_.Decode({&input, 1}, state_, {steps, {}}, tokens, {&count, 1});
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(count, steps);
    next_ = tokens.back();
    return tokens;
  }
  int32_t next() const { return next_; }

 private:
  const Model& model_;
  Sequence sequence_;
  DeviceBuffer memory_;
  MutableTensorView state_;
  int32_t next_ = 0;
};

/// The cost of a token: one replay.
void ExpectFewEvents(int64_t tokens) {
  EXPECT_EQ(TheLog().buffers, 0);
  EXPECT_EQ(TheLog().mapped, 0);
  EXPECT_EQ(TheLog().used_resources, 0);
  EXPECT_EQ(TheLog().residency_commits, 0);
  EXPECT_EQ(TheLog().pipelines, 0);
  constexpr int64_t kLayers = 4;
  EXPECT_LE(TheLog().dispatches, tokens * (11 * kLayers + 4));
  EXPECT_LE(TheLog().barriers, TheLog().dispatches);
  EXPECT_EQ(TheLog().command_buffers, 1);
  EXPECT_EQ(TheLog().waits, 1);
  std::printf("%d tokens: %d command buffers, %d waits, %d dispatches, %d barriers\n",
              static_cast<int>(tokens), static_cast<int>(TheLog().command_buffers),
              static_cast<int>(TheLog().waits), static_cast<int>(TheLog().dispatches),
              static_cast<int>(TheLog().barriers));
}

// Single steps, then passes of several: the third of each kind is a replay.
TEST_F(AppleModel, DecodesAsTheSimulatorWithoutNewBuffers) {
  const std::optional<Model> expected_model = OpenModel("metal-sim");
  const std::optional<Model> model = OpenModel("metal");
  ASSERT_TRUE(expected_model && model);
  Text expected(*expected_model);
  Text text(*model);
  EXPECT_EQ(text.next(), expected.next());
  for (int i = 0; i < 4; ++i) {
    fake_gpu::TheLog() = {};
    text.Step();
    expected.Step();
    EXPECT_EQ(text.next(), expected.next());
  }
  ExpectFewEvents(1);
  constexpr int64_t kSteps = 2;
  for (int i = 0; i < 3; ++i) {
    fake_gpu::TheLog() = {};
    EXPECT_EQ(text.Decode(kSteps), expected.Decode(kSteps));
  }
  ExpectFewEvents(kSteps);
}

}  // namespace
}  // namespace marlin
