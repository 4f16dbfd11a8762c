// The kernels of sampling in the simulator: the tokens, marks, states and errors of the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "backends/cpu/cpu_backend.h"
#include "backends/metal/metal_backend.h"
#include "backends/metal/runtime/simulated_driver.h"
#include "marlin/sampling.h"
#include "ops/decoder/sampling.h"
#include "ops/device/device.h"
#include "plan/step/sample_marks.h"

namespace marlin::metal::simulated_sampler_test {
namespace {

using ::testing::Each;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// The states of some sequences on a device.
class States {
 public:
  States(const Device& device, int64_t count, int64_t vocab) : device_(device), vocab_(vocab) {
    bytes_ = *SamplerStateBytes(device, vocab);
    memory_.emplace(*DeviceBuffer::Allocate(device, count * bytes_));
    std::memset(memory_->data(), 0, static_cast<size_t>(count * bytes_));
    view_ = {memory_->data(), DType::kU8, {count, bytes_}};
  }
  Status Reset(int64_t row, const SamplingOptions& options, const std::vector<int32_t>& prompt) {
    const Status status =
        ResetSampler(device_, options, vocab_,
                     {prompt.data(), DType::kI32, {static_cast<int64_t>(prompt.size())}},
                     {view_.As<uint8_t>() + row * bytes_, DType::kU8, {bytes_}});
    return status.ok() ? device_.Synchronize() : status;
  }
  const MutableTensorView& view() const { return view_; }
  std::vector<uint8_t> Bytes() const {
    const auto* const first = view_.As<uint8_t>();
    return {first, first + view_.ElementCount()};
  }

 private:
  const Device& device_;
  int64_t vocab_;
  int64_t bytes_ = 0;
  std::optional<DeviceBuffer> memory_;
  MutableTensorView view_;
};

/// Operands of a call besides states.
struct Step {
  std::vector<float> logits;  ///< [rows, vocab]
  std::vector<int32_t> state_rows = {};
  bool marks = false;
  std::vector<uint32_t> allowed = {};
  std::vector<int32_t> allowed_rows = {};
  std::vector<int32_t> drafts = {};
};

struct Sampled {
  std::vector<int32_t> tokens;
  Status status;
};

TensorView Indices(const std::vector<int32_t>& values) {
  if (values.empty()) return {};
  return {values.data(), DType::kI32, {static_cast<int64_t>(values.size())}};
}

class SimulatedSampler : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto driver = OpenSimulatedDriver(&launches_);
    opened_ = driver.status();
    if (!opened_.ok()) return;
    auto impl = std::make_shared<Device::Impl>(MakeMetalBackend(std::move(*driver)));
    impl->AddHost(*cpu::OpenCpu({.threads = 1}));
    device_ = Internals::Make<Device>(std::move(impl));
    cpu_ = *Device::Open("cpu", {.threads = 1});
  }
  static void TearDownTestSuite() { device_.reset(); }
  void SetUp() override {
    if (!opened_.ok()) GTEST_SKIP() << opened_.message();
    launches_.clear();
  }

  static Sampled Sample(const Device& device, const Step& step, int64_t vocab,
                        const MutableTensorView& states) {
    const auto rows = static_cast<int64_t>(step.logits.size()) / vocab;
    Sampled sampled{std::vector<int32_t>(static_cast<size_t>(rows), 7777), {}};
    SampleTokensCall call{{step.logits.data(), DType::kF32, {rows, vocab}},
                          states,
                          {sampled.tokens.data(), DType::kI32, {rows}}};
    call.state_rows = Indices(step.state_rows);
    call.marks = step.marks;
    const int64_t words = (vocab + 31) / 32;
    if (!step.allowed.empty()) {
      const int64_t masks = static_cast<int64_t>(step.allowed.size()) / words;
      call.allowed = {step.allowed.data(), DType::kU32, {masks, words}};
    }
    call.allowed_rows = Indices(step.allowed_rows);
    call.drafts = Indices(step.drafts);
    sampled.status = SampleRows(device, call);
    if (sampled.status.ok()) sampled.status = device.Synchronize();
    return sampled;
  }

  /// Runs steps on both devices, and compares tokens, marks and states.
  void Compare(const std::vector<SamplingOptions>& options, int64_t vocab,
               const std::vector<Step>& steps) {
    const auto count = static_cast<int64_t>(options.size());
    States simulated(*device_, count, vocab);
    States host(*cpu_, count, vocab);
    for (int64_t row = 0; row < count; ++row) {
      std::vector<int32_t> prompt;
      for (int64_t i = 0; i < row; ++i) {
        prompt.push_back(static_cast<int32_t>(i * 7 % vocab));
      }
      const SamplingOptions& of_row = options[static_cast<size_t>(row)];
      ASSERT_EQ(simulated.Reset(row, of_row, prompt).message(), "");
      ASSERT_EQ(host.Reset(row, of_row, prompt).message(), "");
    }
    for (const Step& step : steps) {
      const Sampled got = Sample(*device_, step, vocab, simulated.view());
      const Sampled want = Sample(*cpu_, step, vocab, host.view());
      ASSERT_EQ(got.status.message(), want.status.message());
      if (!want.status.ok()) continue;
      ASSERT_EQ(got.tokens, want.tokens);
      ASSERT_EQ(simulated.Bytes(), host.Bytes());
    }
  }

  std::vector<float> Gaussians(int64_t count, float deviation) {
    std::normal_distribution<float> normal(0.0F, deviation);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = normal(random_);
    return values;
  }

  static std::vector<std::string> Functions() {
    std::vector<std::string> names;
    for (const SimulatedLaunch& launch : launches_) names.push_back(launch.function);
    return names;
  }

  std::mt19937 random_{5};
  static inline std::vector<SimulatedLaunch> launches_;
  static inline std::optional<Device> device_;
  static inline std::optional<Device> cpu_;
  static inline Status opened_;
};

TEST_F(SimulatedSampler, GreedyTokensAreThoseOfTheHost) {
  for (const int64_t vocab : {1, 33, 1500}) {
    std::vector<float> logits = Gaussians(3 * vocab, 3.0F);
    for (float& logit : logits) logit = std::round(logit * 2) / 2;  // With ties.
    Compare({{}, {.repetition_penalty = 1.3F}, {.presence_penalty = 0.3F}}, vocab,
            {{logits}, {logits}, {logits}});
  }
  EXPECT_THAT(Functions(), ::testing::Contains("sample_tokens"));
  EXPECT_THAT(Functions(), ::testing::Contains("reset_sampler"));
}

TEST_F(SimulatedSampler, DrawsAreThoseOfTheHost) {
  const std::vector<SamplingOptions> options = {
      {.temperature = 1, .seed = 1},
      {.temperature = 0.7F, .top_k = 5, .seed = 2},
      {.temperature = 1.5F, .top_p = 0.8F, .seed = 3},
      {.temperature = 2, .seed = 4, .min_p = 0.3F},
      {.temperature = 0.9F, .top_k = 40, .top_p = 0.6F, .seed = 5, .min_p = 0.05F},
      {.temperature = 1,
       .seed = 6,
       .repetition_penalty = 1.7F,
       .presence_penalty = 0.1F,
       .frequency_penalty = 0.33F},
      {.temperature = 1e-40F, .top_p = 1e-30F, .seed = 7},
      {.temperature = 3e38F, .top_k = 1000000, .seed = 8}};
  const auto rows = static_cast<int64_t>(options.size());
  for (const int64_t vocab : {2, 70, 1300}) {
    SCOPED_TRACE(vocab);
    std::vector<Step> steps;
    for (const float deviation : {0.0F, 0.5F, 4.0F}) {
      steps.push_back({Gaussians(rows * vocab, deviation)});
      for (float& logit : steps.back().logits) {
        if (deviation > 1.0F && random_() % 2 == 0) logit = std::round(logit);
        if (random_() % 16 == 0) logit = -kInf;
      }
      // Every row has a token.
      for (int64_t row = 0; row < rows; ++row) {
        steps.back().logits[static_cast<size_t>(row * vocab)] = 0.25F;
      }
    }
    Compare(options, vocab, steps);
  }
}

TEST_F(SimulatedSampler, ExtremeLogits) {
  const std::vector<float> logits = {0.0F, -0.0F, 1e-45F, -1e-45F, 3e38F, -3e38F, 1e-38F, -kInf};
  std::vector<Step> steps;
  for (int i = 0; i < 2; ++i) {
    steps.push_back({logits});
    steps.back().logits[4] = i == 0 ? 3e38F : -3e38F;
  }
  for (const float temperature : {1.0F, 1e38F}) {
    Compare({{.temperature = temperature, .top_p = 0.9F, .seed = 9}}, 8, steps);
    Compare({{.temperature = temperature, .seed = 9, .repetition_penalty = 1000.0F}}, 8, steps);
  }
}

// Rows share states or have none, and masks exclude tokens.
TEST_F(SimulatedSampler, RowsHaveStatesAndMasks) {
  constexpr int64_t kVocab = 70;
  Step step{Gaussians(4 * kVocab, 2.0F)};
  step.state_rows = {2, -1, 0, 1};
  step.allowed = {0, 0x00040000U, 1U, 0x0f0f0f0fU, 0xf0U, 0U};
  step.allowed_rows = {1, 0, 0, -1};
  Compare({{}, {.temperature = 1, .seed = 3}, {.temperature = 1, .seed = 4}}, kVocab, {step, step});
}

TEST_F(SimulatedSampler, DraftsThatAreDrawnGoOn) {
  constexpr int64_t kVocab = 40;
  for (int variant = 0; variant < 3; ++variant) {
    Step step{Gaussians(7 * kVocab, 1.0F)};
    // The largest logits: the drafts of a greedy sequence.
    std::vector<int32_t> best;
    for (int64_t row = 0; row < 7; ++row) {
      const auto first = step.logits.begin() + row * kVocab;
      best.push_back(static_cast<int32_t>(std::max_element(first, first + kVocab) - first));
    }
    step.state_rows = {1, 1, 1, 0, 2, 2, 2};
    step.drafts = {best[0], best[1], -1, -1, best[4], best[5], 3};
    if (variant == 1) step.drafts[1] = (best[1] + 1) % kVocab;
    if (variant == 2) step.drafts[4] = (best[4] + 1) % kVocab;
    Compare({{.temperature = 1, .seed = 2}, {}, {.frequency_penalty = 1e-3F}}, kVocab, {step});
  }
}

TEST_F(SimulatedSampler, RowsThatCannotBeSampledHaveMarks) {
  constexpr int64_t kVocab = 40;
  Step step{Gaussians(6 * kVocab, 1.0F)};
  step.marks = true;
  step.logits[39] = kInf;
  step.logits[kVocab + 7] = kNan;
  step.logits[kVocab + 9] = kInf;
  std::fill_n(step.logits.begin() + 2 * kVocab, kVocab, -kInf);
  step.allowed = {0, 0};
  step.allowed_rows = {-1, -1, -1, 0, 1, -1};
  const SamplingOptions drawn{.temperature = 1, .seed = 2};
  Compare({{}, {}, {}, drawn, drawn, drawn}, kVocab, {step});
  step.marks = false;
  Compare({{}, {}, {}, drawn, drawn, drawn}, kVocab, {step});
}

TEST_F(SimulatedSampler, ReportsErrors) {
  constexpr int64_t kVocab = 16;
  const auto both = [&](const Step& step, int64_t states, int64_t vocab) {
    const auto message = [&](const Device& device) {
      States made(device, states, kVocab);
      for (int64_t row = 1; row < states; ++row) EXPECT_TRUE(made.Reset(row, {}, {}).ok());
      return Sample(device, step, vocab, made.view()).status.message();
    };
    const std::string of_host = message(*cpu_);
    EXPECT_EQ(message(*device_), of_host);
    return of_host;
  };
  Step step{std::vector<float>(3 * kVocab)};
  step.state_rows = {1, 3, 0};
  EXPECT_EQ(both(step, 3, kVocab), "state_rows: expected less than 3, got 3 at 1");
  step.state_rows = {1, 2, 0};
  EXPECT_EQ(both(step, 3, kVocab), "states: row 0 was not reset for 16 tokens");
  step.state_rows = {1, 2, 3};
  step.logits[20] = kNan;
  step.logits[40] = kInf;
  EXPECT_EQ(both(step, 4, kVocab), "row 2: logits: nan for token 4");
  // States of as many bytes.
  step = {std::vector<float>(2 * 15)};
  step.state_rows = {2, 1};
  EXPECT_EQ(both(step, 3, 15), "states: row 2 was not reset for 15 tokens");
  States states(*device_, 1, kVocab);
  EXPECT_EQ(states.Reset(0, {}, {3, 16, -1}).message(), "prompt: expected 0..15, got 16 at 1");
  EXPECT_EQ(states.Reset(0, {}, {}).message(), "");
}

/// Results of LogProbabilities.
struct Ranked {
  std::vector<float> of_ids;
  std::vector<int32_t> likely_ids;
  std::vector<float> of_likely;
  std::string error;
};

Ranked Rank(const Device& device, const std::vector<float>& logits, const std::vector<int32_t>& ids,
            int64_t likely) {
  const auto rows = static_cast<int64_t>(ids.size());
  const auto count = static_cast<size_t>(rows * likely);
  Ranked ranked{std::vector<float>(ids.size(), 7),
                std::vector<int32_t>(count, 7),
                std::vector<float>(count, 7),
                {}};
  const int64_t vocab = static_cast<int64_t>(logits.size()) / rows;
  Status status =
      LogProbabilities(device, {logits.data(), DType::kF32, {rows, vocab}}, Indices(ids),
                       {{ranked.of_ids.data(), DType::kF32, {rows}},
                        {ranked.likely_ids.data(), DType::kI32, {rows, likely}},
                        {ranked.of_likely.data(), DType::kF32, {rows, likely}}});
  if (status.ok()) status = device.Synchronize();
  ranked.error = status.message();
  return ranked;
}

void ExpectSame(const std::vector<float>& got, const std::vector<float>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::isnan(want[i])) {
      EXPECT_TRUE(std::isnan(got[i])) << i;
    } else {
      EXPECT_FLOAT_EQ(got[i], want[i]) << i;
    }
  }
}

TEST_F(SimulatedSampler, LogProbabilitiesAreThoseOfTheHost) {
  for (const int64_t vocab : {1, 40, 2100}) {
    std::vector<float> logits = Gaussians(4 * vocab, 5.0F);
    for (float& logit : logits) logit = std::round(logit * 4) / 4;
    logits[0] = -0.0F;
    logits[static_cast<size_t>(vocab)] = kNan;
    std::fill_n(logits.begin() + 2 * vocab, vocab, -kInf);
    logits.back() = -3e38F;
    const std::vector<int32_t> ids = {0, 0, 0, static_cast<int32_t>(vocab - 1)};
    const int64_t likely = std::min<int64_t>(vocab, 20);
    const Ranked got = Rank(*device_, logits, ids, likely);
    const Ranked want = Rank(*cpu_, logits, ids, likely);
    EXPECT_EQ(got.error, want.error);
    EXPECT_EQ(got.likely_ids, want.likely_ids);
    ExpectSame(got.of_ids, want.of_ids);
    ExpectSame(got.of_likely, want.of_likely);
  }
  EXPECT_EQ(Rank(*device_, std::vector<float>(9), {-1, 3, 4}, 0).error,
            "ids: expected 0..2, got 3 at 1");
  EXPECT_THAT(Functions(), Each("log_probabilities"));
}

}  // namespace
}  // namespace marlin::metal::simulated_sampler_test
