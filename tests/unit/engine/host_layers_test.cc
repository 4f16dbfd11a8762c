// Models whose first layers stay on the host: where both devices run the CPU's kernels, every
// bit is the whole model's, and how many layers stay.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../source_directory.h"
#include "../test_device.h"
#include "engine/kv_cache.h"
#include "engine/placement/place_model.h"
#include "marlin/generate.h"
#include "marlin/routing.h"
#include "marlin/sampling.h"
#include "model/mixer.h"
#include "random_model.h"
#include "remote_backend.h"
#include "two_sequences.h"

namespace marlin::host_layers_test {
namespace {

using Tokens = std::vector<int32_t>;

ModelOptions Exact(int64_t gpu_layers, bool invariant = false) {
  ModelOptions options;
  options.allow_bf16_activations = false;
  options.gpu_layers = gpu_layers;
  options.batch_invariant = invariant;
  return options;
}

class HostLayersOf : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    path_ = SourceDirectory() + "/" + GetParam();
    const std::string name = GetParam();
    if (name == "qwen2") testing::WriteQwen2(path_ = directory_.path(), 40);
    if (name == "deepseek_v3") testing::WriteDeepseekV3(path_ = directory_.path(), 128, 4096);
    layers_ = OpenModelDirectory(path_)->config.shape.layers;
  }

  Model Open(const Device& device, const ModelOptions& options) const {
    auto model = Model::Open(path_, device, options);
    EXPECT_TRUE(model.ok()) << model.status().message();
    return *std::move(model);
  }
  Model Whole(const ModelOptions& options) const {
    return Open(*Device::Open("cpu", {.threads = 2}), options);
  }

  static Tokens TextOf(const Model& model, size_t count) {
    return testing::TokensBelow(static_cast<int32_t>(model.info().vocab_size), count);
  }

  /// All logits of two sequences in several calls, one of which takes several passes.
  static std::vector<float> RunCalls(const Model& model) {
    testing::TwoSequences two(model, 700);
    two.Forward(2, 20, true);
    two.Forward(530, 1, false);
    EXPECT_TRUE(two.b.Truncate(7).ok());
    two.Forward(1, 3, true);
    return two.logits;
  }

  /// Texts that are drawn.
  static std::vector<Tokens> Draw(const Model& model) {
    GenerateOptions options;
    options.max_tokens = 9;
    options.ignore_eos = true;
    options.sampling = {.temperature = 1.1F, .top_k = 40, .top_p = 0.95F, .seed = 3};
    options.sampling.repetition_penalty = 1.2F;
    std::vector<Tokens> drawn;
    for (const size_t length : {3U, 40U, 11U}) {
      const auto text = Generate(model, TextOf(model, length), options);
      EXPECT_TRUE(text.ok()) << text.status().message();
      drawn.push_back(text->token_ids);
    }
    return drawn;
  }

  testing::TemporaryDirectory directory_;
  std::string path_;
  int64_t layers_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Models, HostLayersOf,
                         ::testing::Values("qwen2", "deepseek_v3", "examples/tiny-qwen3-moe",
                                           "tests/data/tiny-glm4-moe"),
                         [](const auto& name) { return "Model" + std::to_string(name.index); });

TEST_P(HostLayersOf, HaveTheBitsOfTheWholeModel) {
  for (const bool records : {false, true}) {
    const Device device = testing::OpenRemote({.records = records});
    const Model whole = Whole(Exact(kGpuLayersAuto));
    const std::vector<float> logits = RunCalls(whole);
    const std::vector<Tokens> drawn = Draw(whole);
    for (int64_t count = 0; count <= layers_; ++count) {
      SCOPED_TRACE(count);
      const Model model = Open(device, Exact(count));
      EXPECT_EQ(model.info().host_layers, layers_ - count);
      EXPECT_EQ(model.info().parameters, whole.info().parameters);
      EXPECT_EQ(model.info().host_bytes > 0, count < layers_);
      EXPECT_EQ(model.info().host_bytes_per_token > 0, count < layers_);
      EXPECT_EQ(model.info().ends.embedding.format, whole.info().ends.embedding.format);
      EXPECT_EQ(model.info().ends.head.format, whole.info().ends.head.format);
      EXPECT_EQ(RunCalls(model), logits);
      EXPECT_EQ(Draw(model), drawn);
    }
  }
}

/// The logits after a text of which a sequence adopts what another one has published.
TEST_P(HostLayersOf, SharePrefixes) {
  const Model whole = Whole(Exact(kGpuLayersAuto, true));
  const Model model = Open(testing::OpenRemote(), Exact(1, true));
  const Tokens text = TextOf(model, 600);
  const auto last = [&](const Model& of, Sequence* sequence) {
    const auto fed = static_cast<size_t>(sequence->length());
    std::vector<float> logits(static_cast<size_t>(of.info().vocab_size));
    const SequenceInput input{sequence, std::span(text).subspan(fed)};
    EXPECT_TRUE(
        of.Forward({&input, 1}, {logits.data(), DType::kF32, {1, of.info().vocab_size}}).ok());
    return logits;
  };
  Sequence alone = *whole.NewSequence();
  const std::vector<float> expected = last(whole, &alone);
  Sequence first = *model.NewSequence();
  EXPECT_EQ(first.state()->cache.Adopt(text, ""), 0);
  EXPECT_EQ(last(model, &first), expected);
  first.state()->cache.Publish(text);
  Sequence second = *model.NewSequence();
  EXPECT_EQ(second.state()->cache.Adopt(text, ""), 512);
  EXPECT_EQ(last(model, &second), expected);
}

/// Tokens that are verified as guesses, of which the first two are right.
TEST_P(HostLayersOf, VerifyDrafts) {
  const Model whole = Whole(Exact(kGpuLayersAuto, true));
  const Model model = Open(testing::OpenRemote(), Exact(1, true));
  GenerateOptions options;
  options.max_tokens = 5;
  options.ignore_eos = true;
  const Tokens prompt = TextOf(model, 9);
  const Tokens right = Generate(whole, prompt, options)->token_ids;
  const int64_t bytes = *SamplerStateBytes(model.device(), model.info().vocab_size);
  const DeviceBuffer states = *DeviceBuffer::Allocate(model.device(), bytes);
  const MutableTensorView view(states.data(), DType::kU8, {1, bytes});
  const MutableTensorView state(states.data(), DType::kU8, {bytes});
  const TensorView none(nullptr, DType::kI32, {0});
  ASSERT_TRUE(ResetSampler(model.device(), {}, model.info().vocab_size, none, state).ok());
  Sequence sequence = *model.NewSequence();
  int32_t token = 0;
  const SequenceInput first{&sequence, prompt};
  ASSERT_TRUE(model.ForwardAndSample({&first, 1}, view, {&token, 1}).ok());
  EXPECT_EQ(token, right[0]);
  const Tokens guesses = {right[0], right[1], right[2], (right[3] + 1) % 100};
  SequenceInput input{&sequence, guesses};
  input.drafts = 3;
  Tokens tokens(4);
  ASSERT_TRUE(model.ForwardAndSample({&input, 1}, view, tokens).ok());
  EXPECT_EQ((Tokens{tokens[0], tokens[1], tokens[2]}), (Tokens{right[1], right[2], right[3]}));
  EXPECT_LT(tokens[3], 0);
  EXPECT_EQ(sequence.length(), 9 + 3);
}

TEST_P(HostLayersOf, AreAsManyAsDoNotFit) {
  const ModelDirectory model = *OpenModelDirectory(path_);
  ModelOptions options;
  const auto place = [&](int64_t memory) {
    return PlaceModel(model, testing::OpenRemote({.free_memory = memory}), options);
  };
  const WeightSizes sizes = SizeWeights(model, testing::OpenRemote());
  EXPECT_EQ(sizes.From(0), WeightBytes(model.checkpoint, testing::OpenRemote()));
  const auto cache = [&](int64_t first) {
    return ReservedCacheBytes(model.config, DType::kBf16, first);
  };
  const Device remote = testing::OpenRemote();
  const PassSetting setting = SettingOf(remote, model.config, options, DType::kBf16);
  const auto need = [&](int64_t first) {
    return sizes.From(first) + MixerBytes(setting, first) + cache(first);
  };
  EXPECT_EQ(place(int64_t{1} << 34)->layers.count, 0);
  for (int64_t first = 1; first <= layers_; ++first) {
    // An eighth at most is for activations.
    const int64_t memory = need(first) * 8 / 7 + 8;
    const auto placed = place(memory);
    ASSERT_TRUE(placed.ok()) << placed.status().message();
    // A whole model needs no room for the cache of a long text.
    const bool whole = memory > need(0) - cache(0);
    EXPECT_LE(placed->layers.count, whole ? 0 : first);
    EXPECT_EQ(placed->layers.count > 0, !whole);
    EXPECT_TRUE(whole || placed->for_cache > cache(placed->layers.count));
  }
  const auto none = place(need(layers_) / 2);
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.status().code(), Code::kOutOfMemory);
  // The same by ModelOptions::device_memory, and a model that runs.
  options.device_memory = need(layers_) * 8 / 7 + 8;
  const auto opened = Model::Open(path_, testing::OpenRemote({.free_memory = 1 << 30}), options);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  EXPECT_GT(opened->info().host_layers, 0);
  EXPECT_FALSE(RunCalls(*opened).empty());
}

TEST_P(HostLayersOf, AreRefusedWhereTheyCannotBe) {
  ModelOptions options;
  const auto message = [&](const Device& device) {
    return Model::Open(path_, device, options).status().message();
  };
  const std::string expected =
      "gpu_layers: expected 0.." + std::to_string(layers_) + " (the model's layers), got ";
  options.gpu_layers = layers_ + 1;
  EXPECT_EQ(message(testing::OpenRemote()), expected + std::to_string(layers_ + 1));
  options.gpu_layers = -2;
  EXPECT_EQ(message(testing::OpenRemote()), expected + "-2");
  options.gpu_layers = 1;
  EXPECT_EQ(message(*Device::Open("cpu")), "gpu_layers: cpu is the host and runs all layers");
  options.prepared = "some.prepared";
  EXPECT_EQ(message(testing::OpenRemote()),
            "gpu_layers: not with prepared weights, which are all the device's");
}

TEST_P(HostLayersOf, AreNotThoseWhoseKeysTheDeviceReads) {
  ModelDirectory model = *OpenModelDirectory(path_);
  model.config.layers.back().sizes.kv_source = 0;
  ModelOptions options;
  options.gpu_layers = 1;
  const std::string layers = std::to_string(layers_);
  EXPECT_EQ(PlaceModel(model, testing::OpenRemote(), options).status().message(),
            "gpu_layers: layer " + std::to_string(layers_ - 1) +
                " reads the keys of layer 0; expected 0 or " + layers + ".." + layers + ", got 1");
  options.gpu_layers = kGpuLayersAuto;
  const int64_t memory = SizeWeights(model, testing::OpenRemote()).From(1) + (1 << 20);
  const auto placed = PlaceModel(model, testing::OpenRemote({.free_memory = memory}), options);
  const int64_t count = placed.ok() ? placed->layers.count : 0;
  EXPECT_TRUE(count == 0 || count == layers_) << count;
}

// Experts of the device's layers stay on the host, too.
TEST(HostLayers, GoWithHostExperts) {
  const std::string path = SourceDirectory() + "/examples/tiny-qwen3-moe";
  const Device device = testing::OpenRemote({.fuses_experts = false, .plans_experts = true});
  ModelOptions options = Exact(kGpuLayersAuto);
  const auto greedy = [&] {
    const auto model = Model::Open(path, device, options);
    EXPECT_TRUE(model.ok()) << model.status().message();
    EXPECT_EQ(model->info().host_experts,
              options.host_experts * (options.gpu_layers < 0 ? 4 : options.gpu_layers));
    const Tokens prompt = {1, 2, 3, 4};
    GenerateOptions generate;
    generate.max_tokens = 12;
    return Generate(*model, prompt, generate)->token_ids;
  };
  const Tokens expected = greedy();
  options.gpu_layers = 3;
  options.host_experts = 5;
  EXPECT_EQ(greedy(), expected);
}

// The experts of all layers are counted, on both devices.
/// Guesses leave states of the host's layers, too.
TEST(HostLayers, VerifyDraftsOfRecurrentModels) {
  testing::TemporaryDirectory directory;
  testing::WriteRecurrent("nemotron_h", directory.path(), 128);
  const Model whole = *Model::Open(directory.path(), *Device::Open("cpu", {.threads = 2}),
                                   Exact(kGpuLayersAuto, true));
  const auto model = Model::Open(directory.path(), testing::OpenRemote(), Exact(1, true));
  ASSERT_TRUE(model.ok()) << model.status().message();
  EXPECT_GT(model->info().host_layers, 0);
  const Tokens text = Generate(whole, Tokens{5, 9, 2}, {.max_tokens = 3})->token_ids;
  const int64_t bytes = *SamplerStateBytes(model->device(), 128);
  const DeviceBuffer memory = *DeviceBuffer::Allocate(model->device(), bytes);
  const MutableTensorView state(memory.data(), DType::kU8, {bytes});
  const TensorView none(nullptr, DType::kI32, {0});
  ASSERT_TRUE(ResetSampler(model->device(), {}, 128, none, state).ok());
  const auto logits_after = [](const Model& of, Sequence* sequence, const Tokens& tokens) {
    std::vector<float> logits(128);
    const SequenceInput input{sequence, tokens};
    EXPECT_TRUE(of.Forward({&input, 1}, {logits.data(), DType::kF32, {1, 128}}).ok());
    return logits;
  };
  Sequence sequence = *model->NewSequence();
  logits_after(*model, &sequence, {5, 9});
  // The first two guesses are right.
  const Tokens guesses = {2, text[0], text[1], (text[2] + 1) % 128, 7};
  const SequenceInput input{.sequence = &sequence, .tokens = guesses, .drafts = 4};
  Tokens sampled(5);
  ASSERT_TRUE(
      model->ForwardAndSample({&input, 1}, {memory.data(), DType::kU8, {1, bytes}}, sampled).ok());
  EXPECT_EQ((Tokens{sampled[0], sampled[1], sampled[2]}), text);
  EXPECT_EQ(sequence.length(), 5);
  Sequence alone = *whole.NewSequence();
  EXPECT_EQ(logits_after(*model, &sequence, {text[2], 30}),
            logits_after(whole, &alone, {5, 9, 2, text[0], text[1], text[2], 30}));
}

TEST(HostLayers, TellTheirSelections) {
  const std::string path = SourceDirectory() + "/examples/tiny-qwen3-moe";
  const std::vector<Tokens> texts = {{1, 2, 3, 4, 5, 6, 7, 8, 9}};
  const auto count = [&](const Device& device, int64_t layers) {
    const auto routing = CountRouting(*Model::Open(path, device, Exact(layers)), texts);
    EXPECT_TRUE(routing.ok()) << routing.status().message();
    std::vector<std::vector<int64_t>> counts;
    for (const auto& layer : routing->layers) counts.push_back(layer.counts);
    return counts;
  };
  const auto expected = count(*Device::Open("cpu"), kGpuLayersAuto);
  const Device remote = testing::OpenRemote({.fuses_experts = false, .plans_experts = true});
  EXPECT_EQ(count(remote, 2), expected);
  EXPECT_EQ(expected.size(), 4U);
}

// The sample models' golden tokens with some layers on the tests' device, or a few of them on the
// Metal simulator.
TEST(HostLayers, WriteGoldenTokens) {
  const auto opened = Device::Open(OnOtherDevice() ? TestDevice() : "metal-sim");
  if (!opened.ok()) GTEST_SKIP() << opened.status().message();
  const Device& device = *opened;
  for (const char* const name : {"examples/tiny-qwen3-moe", "tests/data/tiny-glm4-moe"}) {
    const std::string path = SourceDirectory() + "/" + name;
    const auto golden = nlohmann::json::parse(std::ifstream(path + "/golden.json"));
    const Tokens prompt = golden["prompt_ids"].get<Tokens>();
    Tokens expected = golden["greedy_ids"].get<Tokens>();
    if (!OnOtherDevice()) expected.resize(2);
    const int64_t all = OpenModelDirectory(path)->config.shape.layers;
    for (int64_t layers = 0; layers <= all; layers += OnOtherDevice() ? 1 : 2) {
      const auto model = Model::Open(path, device, Exact(layers));
      ASSERT_TRUE(model.ok()) << model.status().message();
      GenerateOptions options;
      options.max_tokens = static_cast<int64_t>(expected.size());
      options.ignore_eos = true;
      EXPECT_EQ(Generate(*model, prompt, options)->token_ids, expected) << layers;
    }
  }
}

}  // namespace
}  // namespace marlin::host_layers_test
