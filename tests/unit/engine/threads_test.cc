// One device, its prepared weights and one model used by several threads at once, and several
// checkpoints written at once: the results equal those of one caller at a time. Also run under
// ThreadSanitizer (tools/sanitize.sh tsan).
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "../../source_directory.h"
#include "../checkpoint/test_files.h"
#include "marlin/checkpoint.h"
#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/model.h"
#include "marlin/quantize.h"

namespace marlin::threads_test {
namespace {

constexpr int kCallers = 4;
const std::string kModel = SourceDirectory() + "/tests/data/tiny-glm4-moe";

/// Calls body(caller) from several threads at once.
void AtOnce(const std::function<void(int caller)>& body) {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) callers.emplace_back(body, caller);
  for (std::thread& thread : callers) thread.join();
}

Device ThreeThreads() {
  DeviceOptions options;
  options.threads = 3;
  return *Device::Open("cpu", options);
}

/// Feeds the caller's own prompt and then two sequences per call; returns all logits, concatenated.
std::vector<float> RunSequences(const Model& model, int caller) {
  const int64_t vocab = model.info().vocab_size;
  std::array<Sequence, 2> sequences = {*model.NewSequence(), *model.NewSequence()};
  std::vector<float> all;
  const auto feed = [&](std::vector<SequenceInput> inputs, int64_t rows) {
    std::vector<float> logits(static_cast<size_t>(rows * vocab));
    const Status status =
        model.Forward(inputs, MutableTensorView(logits.data(), DType::kF32, {rows, vocab}));
    EXPECT_TRUE(status.ok()) << status.message();
    all.insert(all.end(), logits.begin(), logits.end());
  };
  const std::vector<int32_t> prompt = {caller + 1, 7, 2 * caller + 3, 11, 5};
  feed({{&sequences[0], prompt, true}}, static_cast<int64_t>(prompt.size()));
  for (int32_t step = 0; step < 3; ++step) {
    const std::array<int32_t, 2> tokens = {step + caller, 20 + step};
    feed({{&sequences[0], {tokens.data(), 1}}, {&sequences[1], {tokens.data() + 1, 1}}}, 2);
  }
  return all;
}

TEST(Threads, OneModelForwardsSeveralSequencesAtOnce) {
  const Device device = ThreeThreads();
  for (const bool bf16 : {false, true}) {
    const auto model = Model::Open(kModel, device, {.allow_bf16_activations = bf16});
    ASSERT_TRUE(model.ok()) << model.status().message();
    std::array<std::vector<float>, kCallers> alone;
    std::array<std::vector<float>, kCallers> together;
    for (int caller = 0; caller < kCallers; ++caller) {
      alone[static_cast<size_t>(caller)] = RunSequences(*model, caller);
    }
    AtOnce(
        [&](int caller) { together[static_cast<size_t>(caller)] = RunSequences(*model, caller); });
    for (size_t caller = 0; caller < kCallers; ++caller) {
      EXPECT_EQ(alone[caller], together[caller]) << "caller " << caller;
    }
  }
}

TEST(Threads, QuantizeAndMultiplyAtOnce) {
  constexpr int64_t kK = 512;
  constexpr int64_t kN = 400;
  constexpr int64_t kM = 9;
  std::vector<float> dense(kK * kN);
  for (size_t i = 0; i < dense.size(); ++i) dense[i] = static_cast<float>(i % 251) / 125 - 1;
  const TensorView view(dense.data(), DType::kF32, {kK, kN});
  const QuantizeOptions options{.format = Format::kFp4E2M1, .group_size = 64};
  const Device device = ThreeThreads();
  const auto shared = Quantize(view, options);
  ASSERT_TRUE(shared.ok()) << shared.status().message();
  const auto prepared = Prepare(*shared, device);
  ASSERT_TRUE(prepared.ok()) << prepared.status().message();
  const auto multiply = [&](const PreparedWeights& weights) {
    std::vector<float> out(kM * kN);
    const Status status = Gemm(device, TensorView(dense.data(), DType::kF32, {kM, kK}), weights,
                               MutableTensorView(out.data(), DType::kF32, {kM, kN}));
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  };
  const std::vector<float> expected = multiply(*prepared);
  AtOnce([&](int) {
    for (int round = 0; round < 3; ++round) {
      const auto own = Quantize(view, options);
      ASSERT_TRUE(own.ok()) << own.status().message();
      const auto own_prepared = Prepare(*own, device);
      ASSERT_TRUE(own_prepared.ok()) << own_prepared.status().message();
      EXPECT_EQ(multiply(*own_prepared), expected);
      EXPECT_EQ(multiply(*prepared), expected);
    }
  });
}

std::string FileText(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Threads, SeveralCheckpointsAreWrittenAtOnce) {
  testing::TemporaryDirectory directory;
  const auto write = [&](const std::string& name) {
    const auto report = QuantizeCheckpoint(kModel, directory / name, {});
    EXPECT_TRUE(report.ok()) << report.status().message();
    const Status back =
        DequantizeCheckpoint(directory / name, directory / (name + "-plain"), DType::kBf16, false);
    EXPECT_TRUE(back.ok()) << back.message();
  };
  write("alone");
  AtOnce([&](int caller) { write("together" + std::to_string(caller)); });
  for (int caller = 0; caller < kCallers; ++caller) {
    for (const std::string end : {"", "-plain"}) {
      const std::filesystem::path alone = directory / ("alone" + end);
      size_t files = 0;
      for (const auto& entry : std::filesystem::directory_iterator(alone)) {
        if (entry.path().extension() != ".safetensors") continue;
        ++files;
        const std::filesystem::path other =
            std::filesystem::path(directory / ("together" + std::to_string(caller) + end)) /
            entry.path().filename();
        EXPECT_TRUE(FileText(entry.path()) == FileText(other)) << other;
      }
      EXPECT_GE(files, 1u);
    }
  }
}

}  // namespace
}  // namespace marlin::threads_test
