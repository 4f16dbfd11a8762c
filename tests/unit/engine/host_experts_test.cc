// Models some of whose experts stay in the host's memory: which ones, and that the results are
// those of a model that is wholly on its device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../../source_directory.h"
#include "../test_device.h"
#include "engine/kv_cache.h"
#include "engine/placement/choose_host_experts.h"
#include "marlin/checkpoint.h"
#include "marlin/generate.h"
#include "marlin/recipe.h"
#include "marlin/routing.h"
#include "random_model.h"
#include "remote_backend.h"

namespace marlin::host_experts_test {
namespace {

constexpr int64_t kExperts = 8;  // In a layer of the sample models.

std::string SampleModel(const std::string& name) { return SourceDirectory() + "/" + name; }

class HostExpertsOf : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    path_ = SampleModel(GetParam());
    std::ifstream file(path_ + "/golden.json");
    ASSERT_TRUE(file.good()) << path_;
    prompt_ = nlohmann::json::parse(file)["prompt_ids"].get<std::vector<int32_t>>();
    device_ = *Device::Open(TestDevice(), {.threads = 2});
  }

  Result<Model> Open(const ModelOptions& options) { return Model::Open(path_, *device_, options); }

  std::vector<int32_t> Greedy(const Model& model) {
    GenerateOptions options;
    options.max_tokens = 24;
    options.ignore_eos = true;
    const auto text = Generate(model, prompt_, options);
    EXPECT_TRUE(text.ok()) << text.status().message();
    return text.ok() ? text->token_ids : std::vector<int32_t>();
  }

  std::vector<float> Logits(const Model& model) {
    Sequence sequence = *model.NewSequence();
    const auto rows = static_cast<int64_t>(prompt_.size());
    std::vector<float> logits(static_cast<size_t>(rows * model.info().vocab_size));
    const SequenceInput input{&sequence, prompt_, true};
    const Status status =
        model.Forward({&input, 1}, {logits.data(), DType::kF32, {rows, model.info().vocab_size}});
    EXPECT_TRUE(status.ok()) << status.message();
    return logits;
  }

  std::string path_;
  std::vector<int32_t> prompt_;
  std::optional<Device> device_;
};

INSTANTIATE_TEST_SUITE_P(SampleModels, HostExpertsOf,
                         ::testing::Values("examples/tiny-qwen3-moe", "tests/data/tiny-glm4-moe"),
                         [](const auto& directory) {
                           return std::string(directory.param).find("qwen3") != std::string::npos
                                      ? "Qwen3Moe"
                                      : "Glm4Moe";
                         });

TEST_P(HostExpertsOf, WriteTheSameTokens) {
  const Model whole = *Open({.allow_bf16_activations = false});
  const std::vector<int32_t> tokens = Greedy(whole);
  const std::vector<float> logits = Logits(whole);
  ASSERT_EQ(whole.info().host_experts, 0);
  for (const int64_t count : {int64_t{1}, kExperts / 2, kExperts}) {
    ModelOptions options{.allow_bf16_activations = false};
    options.host_experts = count;
    const auto model = Open(options);
    ASSERT_TRUE(model.ok()) << model.status().message();
    EXPECT_EQ(model->info().host_experts % count, 0);
    EXPECT_GE(model->info().host_experts, count);
    EXPECT_GT(model->info().host_bytes, 0);
    EXPECT_LT(model->info().bytes, whole.info().bytes);
    EXPECT_EQ(Greedy(*model), tokens) << count;
    const std::vector<float> placed = Logits(*model);
    for (size_t i = 0; i < logits.size(); ++i) {
      ASSERT_NEAR(placed[i], logits[i], 1e-4 * std::max(1.0F, std::abs(logits[i]))) << i;
    }
  }
}

TEST_P(HostExpertsOf, AreRefusedWhereTheyCannotBe) {
  const auto expect_invalid = [&](const ModelOptions& options, const std::string& message) {
    const auto model = Open(options);
    ASSERT_FALSE(model.ok());
    EXPECT_EQ(model.status().code(), Code::kInvalidArgument);
    EXPECT_NE(model.status().message().find(message), std::string::npos)
        << model.status().message();
  };
  ModelOptions options;
  options.host_experts = kExperts + 1;
  expect_invalid(options, "host_experts: expected 0..8 (the model's experts), got 9");
  options.host_experts = -2;
  expect_invalid(options, "host_experts: expected 0..8 (the model's experts), got -2");
  options.host_experts = 1;
  options.prepared = "some.prepared";
  expect_invalid(options, "host_experts: not with prepared weights");
  options.prepared.clear();
  RoutingFrequencies other;
  other.model_type = "other";
  options.routing = &other;
  expect_invalid(options, "routing: frequencies of another model (other)");
}

// The selections of experts: 7, 6, 5, ... in even layers, 0, 1, 2, ... in odd ones.
RoutingFrequencies Frequencies(const ModelDirectory& model) {
  RoutingFrequencies routing;
  routing.model_type = model.config.family->model_type;
  for (int64_t i = 0; i < model.config.shape.layers; ++i) {
    if (!IsSparse(*model.config.family, model.config.shape, i)) continue;
    std::vector<int64_t> counts;
    for (int64_t e = 0; e < kExperts; ++e) counts.push_back(i % 2 == 0 ? kExperts - 1 - e : e);
    routing.layers.push_back({i, counts});
  }
  return routing;
}

TEST_P(HostExpertsOf, AreThoseSelectedLeast) {
  const ModelDirectory model = *OpenModelDirectory(path_);
  const RoutingFrequencies routing = Frequencies(model);
  ModelOptions options;
  options.host_experts = 3;
  options.routing = &routing;
  const auto chosen = ChooseHostExperts(model, *device_, options);
  ASSERT_TRUE(chosen.ok()) << chosen.status().message();
  EXPECT_EQ(chosen->count, 3 * static_cast<int64_t>(routing.layers.size()));
  for (const RoutingFrequencies::Layer& layer : routing.layers) {
    for (int64_t e = 0; e < kExperts; ++e) {
      EXPECT_EQ(chosen->Has(layer.layer, e), layer.counts[static_cast<size_t>(e)] < 3);
    }
  }
  // Without frequencies the last ones stay.
  options.routing = nullptr;
  const auto last = ChooseHostExperts(model, *device_, options);
  ASSERT_TRUE(last.ok());
  for (int64_t e = 0; e < kExperts; ++e) EXPECT_EQ(last->Has(routing.layers[0].layer, e), e >= 5);
}

TEST_P(HostExpertsOf, AreAsManyAsDoNotFit) {
  const ModelDirectory model = *OpenModelDirectory(path_);
  ModelOptions options;
  options.host_experts = kHostExpertsAuto;
  const auto choose = [&](int64_t memory) {
    testing::RemoteOptions remote;
    remote.plans_experts = true;
    remote.fuses_experts = false;
    remote.free_memory = memory;
    return ChooseHostExperts(model, testing::OpenRemote(remote), options);
  };
  // Device memory that the host does not share, with room for everything, for less, for nothing.
  EXPECT_EQ(choose(int64_t{1} << 34)->count, 0);
  int64_t before = 0;
  const int64_t weights = WeightBytes(model.checkpoint, testing::OpenRemote());
  for (int64_t share = 9; share >= 0; --share) {
    const auto chosen = choose(weights * share / 10 + (1 << 22));
    if (!chosen.ok()) {
      EXPECT_EQ(chosen.status().code(), Code::kOutOfMemory);
      EXPECT_NE(chosen.status().message().find("without experts"), std::string::npos);
      break;
    }
    EXPECT_GE(chosen->count, before);
    EXPECT_GE(chosen->bytes, weights - (weights * share / 10 + (1 << 22)));
    before = chosen->count;
  }
  EXPECT_GT(before, 0);
  // With room for all weights and a cache of fp8, wider caches leave experts on the host.
  const int64_t tokens = std::min<int64_t>(model.config.max_positions, 8192);
  const int64_t room = weights + CacheTokenBytes(model.config, DType::kF8E4M3) * tokens;
  const auto bytes_beside = [&](DType cache) {
    options.kv_cache = cache;
    return choose(room)->bytes;
  };
  EXPECT_EQ(bytes_beside(DType::kF8E4M3), 0);
  EXPECT_GT(bytes_beside(DType::kBf16), 0);
  EXPECT_GT(bytes_beside(DType::kF32), bytes_beside(DType::kBf16));
  options.kv_cache.reset();
  // The CPU shares the host's memory.
  EXPECT_EQ(ChooseHostExperts(model, *Device::Open("cpu"), options)->count, 0);
}

TEST_P(HostExpertsOf, RunBesideADeviceWithItsOwnMemory) {
  testing::RemoteOptions remote;
  remote.plans_experts = true;
  remote.fuses_experts = false;
  const Device device = testing::OpenRemote(remote);
  ModelOptions options{.allow_bf16_activations = false};
  const auto whole = Model::Open(path_, device, options);
  ASSERT_TRUE(whole.ok()) << whole.status().message();
  options.host_experts = 5;
  const auto model = Model::Open(path_, device, options);
  ASSERT_TRUE(model.ok()) << model.status().message();
  EXPECT_EQ(Greedy(*model), Greedy(*whole));
}

// A device that expands 2:4 weights holds dense ones.
TEST(WeightBytes, AreThoseThatTheDeviceHolds) {
  const testing::TemporaryDirectory directory;
  const auto bytes = [&](const char* format) {
    QuantizeCheckpointOptions options;
    options.recipe = *MixedPrecisionConfig::Uniform(format);
    options.overwrite = true;
    const std::string to = directory / "quantized";
    const auto report = QuantizeCheckpoint(SampleModel("examples/tiny-qwen3-moe"), to, options);
    EXPECT_TRUE(report.ok()) << report.status().message();
    return WeightBytes(OpenModelDirectory(to)->checkpoint, testing::OpenRemote());
  };
  EXPECT_EQ(bytes("s4/g32/2:4"), bytes("s4/g32"));
}

TEST(HostExperts, NeedAModelWithExperts) {
  const testing::TemporaryDirectory directory;
  testing::WriteQwen2(directory.path(), 2);
  ModelOptions options;
  options.host_experts = kHostExpertsAuto;
  const auto model = Model::Open(directory.path(), *Device::Open("cpu"), options);
  ASSERT_FALSE(model.ok());
  EXPECT_EQ(model.status().message(), "host_experts: qwen2 has no experts");
}

}  // namespace
}  // namespace marlin::host_experts_test
