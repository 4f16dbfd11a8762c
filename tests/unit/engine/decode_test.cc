// Decode: the tokens, sequences and samplers that single steps give, however many steps a pass has;
// on the test's device and on one that records passes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../checkpoint/test_files.h"
#include "../test_device.h"
#include "base/json.h"
#include "base/scalars.h"
#include "marlin/checkpoint.h"
#include "marlin/generate.h"
#include "marlin/model.h"
#include "plan/step/sample_marks.h"
#include "random_model.h"
#include "recipe/architecture.h"
#include "remote_backend.h"

namespace marlin::decode_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::TemporaryDirectory;
using testing::TestTensor;

constexpr int32_t kVocab = 96;

Json Config(const std::string& type, const Json& changes) {
  Json config = {{"model_type", type},       {"hidden_size", 64},
                 {"intermediate_size", 96},  {"num_hidden_layers", 3},
                 {"vocab_size", kVocab},     {"num_attention_heads", 4},
                 {"num_key_value_heads", 2}, {"moe_intermediate_size", 32},
                 {"num_experts_per_tok", 2}, {"max_position_embeddings", 4096}};
  config.update(changes);
  return config;
}

Json Llama(int64_t positions = 4096) {
  return Config("llama", {{"head_dim", 16}, {"max_position_embeddings", positions}});
}

/// Writes a model of random weights, whose layers add about as much as there was before.
void Write(const std::string& path, const Json& config, int32_t nan_token = -1) {
  const auto model = DescribeModel(config.dump());
  ASSERT_TRUE(model.ok()) << model.status().message();
  std::vector<TestTensor> tensors;
  for (const ModelTensor& tensor : model->tensors) {
    const int rank = tensor.shape.rank();
    const bool embedding = tensor.name.find("embed") != std::string::npos;
    const float scale =
        rank < 2 || embedding ? 1.0F : 1.0F / std::sqrt(static_cast<float>(tensor.shape[rank - 1]));
    tensors.push_back(testing::RandomBf16(tensor.name, tensor.shape,
                                          static_cast<uint32_t>(tensors.size()), scale));
    if (!embedding || nan_token < 0) continue;
    const uint16_t nan = FloatToBf16(std::numeric_limits<float>::quiet_NaN());
    std::memcpy(tensors.back().data.data() + nan_token * tensor.shape[1] * 2, &nan, sizeof(nan));
  }
  testing::WriteFile(path + "/config.json", config.dump());
  testing::WriteFile(path + "/model.safetensors", testing::BuildSafetensors(tensors));
}

/// The samplers of some sequences.
class Samplers {
 public:
  Samplers(const Model& model, const std::vector<SamplingOptions>& options,
           const std::vector<std::vector<int32_t>>& prompts)
      : bytes_(*SamplerStateBytes(model.device(), kVocab)),
        count_(static_cast<int64_t>(options.size())),
        memory_(*DeviceBuffer::Allocate(model.device(), bytes_ * count_)) {
    for (size_t i = 0; i < options.size(); ++i) {
      const auto count = static_cast<int64_t>(prompts[i].size());
      const DeviceBuffer prompt = *DeviceBuffer::Allocate(model.device(), 4 * count);
      EXPECT_TRUE(prompt.CopyFrom(prompts[i].data(), 4 * count).ok());
      auto* const state = static_cast<uint8_t*>(memory_.data()) + static_cast<int64_t>(i) * bytes_;
      const Status reset =
          ResetSampler(model.device(), options[i], kVocab, {prompt.data(), DType::kI32, {count}},
                       {state, DType::kU8, {bytes_}});
      EXPECT_TRUE(reset.ok()) << reset.message();
      EXPECT_TRUE(model.device().Synchronize().ok());
    }
  }
  MutableTensorView view() const { return {memory_.data(), DType::kU8, {count_, bytes_}}; }

 private:
  int64_t bytes_;
  int64_t count_;
  DeviceBuffer memory_;
};

/// Some sequences of a model behind their prompts, with the token that each goes on with.
class Texts {
 public:
  Texts(const Model& model, const std::vector<std::vector<int32_t>>& prompts,
        const std::vector<SamplingOptions>& options, bool truncatable = true)
      : model_(model), samplers_(model, options, prompts), next_(prompts.size()) {
    std::vector<SequenceInput> inputs;
    for (size_t i = 0; i < prompts.size(); ++i) {
      sequences_.push_back(*model.NewSequence({.truncatable = truncatable}));
    }
    for (size_t i = 0; i < prompts.size(); ++i) inputs.push_back({&sequences_[i], prompts[i]});
    const Status status = model.ForwardAndSample(inputs, samplers_.view(), next_);
    EXPECT_TRUE(status.ok()) << status.message();
  }

  /// Single steps of all sequences: [sequences][steps].
  std::vector<std::vector<int32_t>> Step(int64_t steps) {
    std::vector<std::vector<int32_t>> texts(sequences_.size());
    for (int64_t step = 0; step < steps; ++step) {
      std::vector<SequenceInput> inputs;
      const std::vector<int32_t> fed = next_;
      for (size_t i = 0; i < texts.size(); ++i) inputs.push_back({&sequences_[i], {&fed[i], 1}});
      const Status status = model_.ForwardAndSample(inputs, samplers_.view(), next_);
      EXPECT_TRUE(status.ok()) << status.message();
      for (size_t i = 0; i < texts.size(); ++i) texts[i].push_back(next_[i]);
    }
    return texts;
  }

  Result<std::vector<std::vector<int32_t>>> TryDecode(int64_t steps,
                                                      const std::vector<int32_t>& stops = {}) {
    std::vector<DecodeInput> inputs;
    for (size_t i = 0; i < sequences_.size(); ++i) inputs.push_back({&sequences_[i], next_[i]});
    const auto row = static_cast<size_t>(steps);
    std::vector<int32_t> tokens(sequences_.size() * row, -7);
    counts_.assign(sequences_.size(), -7);
    std::vector<int64_t> lengths;
    for (const Sequence& sequence : sequences_) lengths.push_back(sequence.length());
    const Status status = model_.Decode(inputs, samplers_.view(), {steps, stops}, tokens, counts_);
    decoded_ = tokens;
    std::vector<std::vector<int32_t>> texts;
    for (size_t i = 0; i < sequences_.size(); ++i) {
      const auto first = tokens.begin() + static_cast<std::ptrdiff_t>(i * row);
      texts.emplace_back(first, first + counts_[i]);
      EXPECT_EQ(sequences_[i].length(), lengths[i] + counts_[i]);
      if (counts_[i] > 0) next_[i] = texts[i].back();
    }
    if (!status.ok()) return status;
    return texts;
  }
  std::vector<std::vector<int32_t>> Decode(int64_t steps, const std::vector<int32_t>& stops = {}) {
    auto texts = TryDecode(steps, stops);
    EXPECT_TRUE(texts.ok()) << texts.status().message();
    return texts.ok() ? *texts : std::vector<std::vector<int32_t>>(sequences_.size());
  }

  /// The logits after some more tokens, which show what the caches hold.
  std::vector<float> Probe(size_t sequence) {
    const std::vector<int32_t> tokens = {7, 1, 30};
    std::vector<float> logits(3 * kVocab);
    const SequenceInput input{&sequences_[sequence], tokens, true};
    const Status status = model_.Forward({&input, 1}, {logits.data(), DType::kF32, {3, kVocab}});
    EXPECT_TRUE(status.ok()) << status.message();
    return logits;
  }
  Sequence& sequence(size_t i) { return sequences_[i]; }
  /// Lets a sequence go on with another token than the one that it sampled.
  void Continue(size_t sequence, int32_t token) { next_[sequence] = token; }
  const std::vector<int64_t>& counts() const { return counts_; }
  /// All elements that the last decode call wrote, [sequences, steps].
  const std::vector<int32_t>& decoded() const { return decoded_; }

 private:
  const Model& model_;
  Samplers samplers_;
  std::vector<Sequence> sequences_;
  std::vector<int32_t> next_;
  std::vector<int64_t> counts_;
  std::vector<int32_t> decoded_;
};

std::vector<int32_t> Prompt(size_t count) { return testing::TokensBelow(kVocab, count); }

const SamplingOptions kSampled{.temperature = 1.2F,
                               .top_k = 60,
                               .top_p = 0.97F,
                               .seed = 5,
                               .repetition_penalty = 1.2F,
                               .frequency_penalty = 0.1F};

/// The test's device, or one that records passes on the CPU.
class Decoding : public ::testing::TestWithParam<std::string> {
 protected:
  bool records() const { return GetParam() == "remote" || GetParam() == "cuda"; }
  Device Open(testing::RemoteOptions options = {}) const {
    options.records = true;
    if (GetParam() == "remote") return testing::OpenRemote(options);
    return *Device::Open(GetParam(), {.threads = 2});
  }
  Model Load(const Json& config, ModelOptions options = {.allow_bf16_activations = false},
             int32_t nan_token = -1) {
    Write(directory_.path(), config, nan_token);
    return Load(Open(), options);
  }
  Model Load(const Device& device, const ModelOptions& options) const {
    auto model = Model::Open(directory_.path(), device, options);
    EXPECT_TRUE(model.ok()) << model.status().message();
    return *std::move(model);
  }
  TemporaryDirectory directory_;
};

INSTANTIATE_TEST_SUITE_P(Devices, Decoding, ::testing::Values(TestDevice(), "remote"),
                         [](const auto& device) { return NameOfDevice(device.param); });

/// Models of every kind of cache and of layer, in each mode.
struct Case {
  const char* name;
  Json config;
  ModelOptions options;
  size_t prompt = 9;
};
std::vector<Case> Cases() {
  const ModelOptions usual;
  const ModelOptions exact{.allow_bf16_activations = false};
  const ModelOptions invariant{.batch_invariant = true};
  const ModelOptions fp8{.kv_cache = DType::kF8E4M3};
  const Json moe = {{"num_experts", 6}, {"head_dim", 16}};
  const Json latent = {{"kv_lora_rank", 16},    {"qk_nope_head_dim", 16},
                       {"qk_rope_head_dim", 8}, {"v_head_dim", 16},
                       {"n_routed_experts", 4}, {"n_shared_experts", 2},
                       {"q_lora_rank", 32},     {"n_group", 1},
                       {"topk_group", 1},       {"first_k_dense_replace", 0}};
  Json narrow = latent;  // Expands latents up to two tokens, then no longer.
  narrow.update({{"qk_nope_head_dim", 1}, {"v_head_dim", 1}});
  const Json window = {{"num_local_experts", 4}, {"head_dim", 16}, {"sliding_window", 24}};
  return {{"llama", Llama(), usual},
          {"llama_exact", Llama(), exact},
          {"llama_invariant", Llama(), invariant},
          {"llama_fp8", Llama(), fp8},
          {"qwen3_moe", Config("qwen3_moe", moe), usual},
          {"qwen3_moe_invariant", Config("qwen3_moe", moe), invariant},
          {"qwen2_moe",
           Config("qwen2_moe",
                  {{"num_experts", 4}, {"shared_expert_intermediate_size", 48}, {"head_dim", 16}}),
           usual},
          {"mistral_window", Config("mistral", {{"sliding_window", 20}, {"head_dim", 16}}), exact},
          {"gpt_oss", Config("gpt_oss", window), usual},
          {"deepseek_v3", Config("deepseek_v3", latent), usual},
          {"deepseek_v3_exact", Config("deepseek_v3", latent), exact},
          {"deepseek_v3_narrow", Config("deepseek_v3", narrow), usual, 1}};
}

/// Decodes 40 tokens after a prompt, `steps` at a time, and compares them and the cache behind them
/// with those of single steps.
void ExpectTextOfSingleSteps(const Model& model, const std::vector<int32_t>& prompt,
                             const SamplingOptions& sampling, bool truncatable) {
  Texts single(model, {prompt}, {sampling}, truncatable);
  const std::vector<int32_t> expected = single.Step(40)[0];
  const std::vector<float> probe = single.Probe(0);
  for (const int64_t steps : {1, 2, 5, 8, 20}) {
    SCOPED_TRACE(steps);
    Texts several(model, {prompt}, {sampling}, truncatable);
    std::vector<int32_t> tokens;
    while (tokens.size() < 40) {
      const std::vector<int32_t> more = several.Decode(steps)[0];
      ASSERT_EQ(more.size(), static_cast<size_t>(steps));
      tokens.insert(tokens.end(), more.begin(), more.end());
    }
    EXPECT_EQ(tokens, expected);
    EXPECT_EQ(several.Probe(0), probe);
  }
}

TEST_P(Decoding, AnyNumberOfStepsGivesTheTokensOfSingleSteps) {
  for (const Case& test : Cases()) {
    SCOPED_TRACE(test.name);
    Write(directory_.path(), test.config);
    const auto model = Model::Open(directory_.path(), Open(), test.options);
    ASSERT_TRUE(model.ok()) << model.status().message();
    const std::vector<int32_t> prompt = Prompt(test.prompt);
    for (const bool truncatable : {true, false}) {
      ExpectTextOfSingleSteps(*model, prompt, {}, truncatable);
      ExpectTextOfSingleSteps(*model, prompt, kSampled, truncatable);
    }
  }
}

/// The place of the first stop token, or the number of tokens.
size_t CountUntil(const std::vector<int32_t>& text, const std::vector<int32_t>& stops) {
  for (size_t i = 0; i < text.size(); ++i) {
    if (std::find(stops.begin(), stops.end(), text[i]) != stops.end()) return i + 1;
  }
  return text.size();
}

// After a stop, the samplers and the caches are those of the shorter text: it goes on as if single
// steps had got there. In batch-invariant mode no row depends on those that stay.
TEST_P(Decoding, SequencesOfABatchStopAtStepsOfTheirOwn) {
  for (const Json& config :
       {Llama(), Config("qwen3_moe", {{"num_experts", 6}, {"head_dim", 16}})}) {
    const Model model = Load(config, {.batch_invariant = true});
    const std::vector<std::vector<int32_t>> prompts = {Prompt(5), Prompt(33), Prompt(12),
                                                       Prompt(20)};
    SamplingOptions other = kSampled;
    other.seed = 77;
    const std::vector<SamplingOptions> sampling = {{}, kSampled, other, kSampled};
    Texts single(model, prompts, sampling);
    const auto expected = single.Step(40);
    for (const size_t place : {0U, 3U, 6U, 7U, 8U, 15U}) {
      for (const int64_t steps : {3, 8, 20}) {
        SCOPED_TRACE(std::to_string(place) + " of " + std::to_string(steps));
        // Stops of sequences 1 and 3; the others stop there, too, if they have these tokens.
        const std::vector<int32_t> stops = {-1, expected[1][place], 5000, expected[3][place / 2]};
        Texts several(model, prompts, sampling);
        const auto first = several.Decode(steps, stops);
        std::vector<size_t> at;
        for (size_t i = 0; i < prompts.size(); ++i) {
          auto text = expected[i];
          text.resize(static_cast<size_t>(steps));
          text.resize(CountUntil(text, stops));
          EXPECT_EQ(first[i], text) << i;
          at.push_back(text.size());
        }
        const auto second = several.Decode(9);
        for (size_t i = 0; i < prompts.size(); ++i) {
          const auto from = expected[i].begin() + static_cast<std::ptrdiff_t>(at[i]);
          EXPECT_EQ(second[i], std::vector<int32_t>(from, from + 9)) << i;
        }
      }
    }
  }
}

// Pages have 256 tokens, on CUDA 64, and block tables grow every eight pages. The attention of MLA
// divides keys by the size of the tables on CUDA.
TEST_P(Decoding, PagesAndBlockTablesGrowWithinACall) {
  const Json window = Config("qwen2", {{"use_sliding_window", true},
                                       {"sliding_window", 40},
                                       {"max_window_layers", 1},
                                       {"head_dim", 16}});
  const Json latent = Config("deepseek_v3", {{"kv_lora_rank", 16},
                                             {"qk_nope_head_dim", 16},
                                             {"qk_rope_head_dim", 16},
                                             {"v_head_dim", 16},
                                             {"n_routed_experts", 4},
                                             {"n_shared_experts", 1},
                                             {"n_group", 1},
                                             {"topk_group", 1},
                                             {"first_k_dense_replace", 0},
                                             {"q_lora_rank", 32}});
  for (const Json& config : {window, latent}) {
    const Model model = Load(config, {});
    for (const size_t length : {59U, 250U, 507U, 2043U}) {
      // Eight pages of 256 tokens, on a device that pads its tables.
      if (length == 2043U && (GetParam() != "remote" || config == latent)) continue;
      SCOPED_TRACE(config["model_type"].get<std::string>() + " " + std::to_string(length));
      const std::vector<std::vector<int32_t>> prompts = {Prompt(length)};
      for (const bool truncatable : {true, false}) {
        Texts single(model, prompts, {kSampled}, truncatable);
        const auto expected = single.Step(24)[0];
        const auto probe = single.Probe(0);
        Texts several(model, prompts, {kSampled}, truncatable);
        EXPECT_EQ(several.Decode(24)[0], expected);
        EXPECT_EQ(several.Probe(0), probe);
      }
    }
  }
}

TEST_P(Decoding, EndsWhereTheContextIsFull) {
  const Model model = Load(Llama(48));
  const std::vector<std::vector<int32_t>> prompts = {Prompt(37), Prompt(20)};
  Texts single(model, prompts, {kSampled, {}});
  const auto start = single.Step(11);
  Texts several(model, prompts, {kSampled, {}});
  const auto texts = several.Decode(20);
  EXPECT_THAT(several.counts(), ElementsAre(11, 20));
  EXPECT_EQ(texts[0], start[0]);
  EXPECT_EQ(std::vector<int32_t>(texts[1].begin(), texts[1].begin() + 11), start[1]);
  const auto full = several.TryDecode(2);
  EXPECT_EQ(full.status().message(), "inputs[0]: 49 tokens do not fit in a context of 48");
  EXPECT_THAT(several.counts(), ElementsAre(0, 0));
}

TEST_P(Decoding, GenerationGivesTheTextOfSingleSteps) {
  const Model model = Load(Llama(300));
  const std::vector<int32_t> prompt = Prompt(6);
  Texts single(model, {prompt}, {kSampled});
  const std::vector<int32_t> expected = single.Step(293)[0];
  GenerateOptions options;
  options.max_tokens = 1000;
  options.sampling = kSampled;
  options.ignore_eos = true;
  const auto all = Generate(model, prompt, options);
  ASSERT_TRUE(all.ok()) << all.status().message();
  // The first token comes from the prompt, and the last one is sampled at the last position.
  EXPECT_EQ(all->token_ids.size(), 295U);
  EXPECT_EQ(all->stop_reason, StopReason::kContextFull);
  EXPECT_EQ(std::vector<int32_t>(all->token_ids.begin() + 1, all->token_ids.begin() + 294),
            expected);
  EXPECT_GT(all->decode_seconds, 0.0);
  for (const int64_t most : {1, 2, 9, 16, 17, 38, 200}) {
    options.max_tokens = most;
    const auto text = Generate(model, prompt, options);
    EXPECT_EQ(text->token_ids,
              std::vector<int32_t>(all->token_ids.begin(), all->token_ids.begin() + most));
    EXPECT_EQ(text->stop_reason, StopReason::kMaxTokens);
  }
  // The callback gets every token once and in order, and ends the text at once.
  options.max_tokens = 1000;
  for (const size_t most : {1U, 2U, 13U, 200U}) {
    std::vector<int32_t> seen;
    const auto text = Generate(model, prompt, options, [&](int32_t token) {
      seen.push_back(token);
      return seen.size() < most;
    });
    EXPECT_EQ(text->stop_reason, StopReason::kCallback);
    EXPECT_EQ(text->token_ids.size(), most);
    EXPECT_EQ(text->token_ids, seen);
    EXPECT_TRUE(std::equal(seen.begin(), seen.end(), all->token_ids.begin()));
  }
  options.ignore_eos = false;
  for (const size_t place : {0U, 1U, 20U, 40U, 137U, 200U}) {
    options.stop_token_ids = {all->token_ids[place]};
    const size_t count = CountUntil(all->token_ids, options.stop_token_ids) - 1;
    const auto text = Generate(model, prompt, options);
    EXPECT_EQ(text->token_ids,
              std::vector<int32_t>(all->token_ids.begin(),
                                   all->token_ids.begin() + static_cast<std::ptrdiff_t>(count)));
    EXPECT_EQ(text->stop_reason, StopReason::kStopToken);
  }
}

// A stop token whose embedding is NaN is never fed, also not by the steps behind it.
TEST_P(Decoding, StepsBehindAStopReportNoErrors) {
  for (const Json& config :
       {Llama(), Config("qwen3_moe", {{"num_experts", 6}, {"head_dim", 16}})}) {
    const std::vector<std::vector<int32_t>> prompts = {Prompt(4), Prompt(9)};
    std::vector<std::vector<int32_t>> expected;
    {
      const Model model = Load(config, {.batch_invariant = true});
      Texts single(model, prompts, {kSampled, kSampled});
      expected = single.Step(16);
    }
    const auto fed = [&](int32_t token) {
      const auto in = [token](const std::vector<int32_t>& text, size_t count) {
        return std::find(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(count), token) !=
               text.begin() + static_cast<std::ptrdiff_t>(count);
      };
      return in(prompts[0], 4) || in(prompts[1], 9) || in(expected[1], 15);
    };
    size_t place = 1;
    while (fed(expected[0][place]) || CountUntil(expected[0], {expected[0][place]}) != place + 1) {
      ASSERT_LT(++place, 12U);
    }
    const int32_t bad = expected[0][place];
    const Model model = Load(config, {.batch_invariant = true}, bad);
    Texts several(model, prompts, {kSampled, kSampled});
    const auto texts = several.Decode(16, {bad});
    EXPECT_EQ(texts[0].size(), place + 1);
    EXPECT_EQ(texts[0].back(), bad);
    EXPECT_EQ(texts[1].size(), CountUntil(expected[1], {bad}));
    // Without the stop its logits are NaN, or a router's. A pass that fails changes no sequence.
    Texts failing(model, prompts, {kSampled, kSampled});
    const auto failed = failing.TryDecode(16);
    ASSERT_FALSE(failed.ok());
    EXPECT_THAT(failed.status().message(), HasSubstr("logits: "));
    EXPECT_LE(failing.counts()[0], static_cast<int64_t>(place) + 1);
  }
}

// A token whose embedding is NaN ends the sequence that feeds it, and no other.
TEST_P(Decoding, LogitsThatCannotBeSampledEndTheirRowOnly) {
  constexpr int32_t kBad = 70;
  const Model model = Load(Llama(), {.batch_invariant = true}, kBad);
  const std::vector<int32_t> good = {5, 9, 2};
  Texts alone(model, {good}, {kSampled});
  const std::vector<int32_t> expected = alone.Step(12)[0];
  ASSERT_EQ(CountUntil(expected, {kBad}), 12U);
  // The prompt of the first row ends with the bad token.
  const std::vector<std::vector<int32_t>> prompts = {{5, kBad}, good};
  Samplers samplers(model, {kSampled, kSampled}, prompts);
  std::vector<Sequence> sequences;
  for (int i = 0; i < 2; ++i) sequences.push_back(*model.NewSequence());
  const SequenceInput inputs[] = {{&sequences[0], prompts[0]}, {&sequences[1], prompts[1]}};
  std::array<int32_t, 2> tokens = {};
  Status status = model.ForwardAndSample(inputs, samplers.view(), tokens);
  EXPECT_EQ(status.code(), Code::kNonFiniteInput);
  EXPECT_EQ(status.message(), "row 0: logits: nan for token 0");
  EXPECT_EQ(SampleError(tokens[0]).message(), "logits: nan for token 0");
  EXPECT_EQ(sequences[0].length(), 0);
  EXPECT_EQ(sequences[1].length(), 3);
  // As does one that it decodes.
  Texts texts(model, {Prompt(4), good}, {kSampled, kSampled});
  texts.Continue(0, kBad);
  status = texts.TryDecode(12).status();
  EXPECT_EQ(status.message(), "row 0: logits: nan for token 0");
  EXPECT_THAT(texts.counts(), ElementsAre(0, 12));
  EXPECT_EQ(SampleError(texts.decoded()[0]).message(), "logits: nan for token 0");
  EXPECT_EQ(std::vector<int32_t>(texts.decoded().begin() + 12, texts.decoded().end()), expected);
}

TEST_P(Decoding, RefusesWrongCalls) {
  const Model model = Load(Llama());
  const Model other = Load(Llama());
  const std::vector<std::vector<int32_t>> prompts = {Prompt(4), Prompt(9)};
  Texts texts(model, prompts, {{}, {}});
  const Samplers samplers(model, {{}, {}}, prompts);
  std::array<int32_t, 4> tokens = {};
  std::array<int64_t, 2> counts = {};
  Sequence foreign = *other.NewSequence();
  const auto message = [&](DecodeInput first, DecodeInput second, int64_t steps, size_t room = 4,
                           size_t rows = 2) {
    const DecodeInput inputs[] = {first, second};
    counts = {-1, -1};
    const Status status =
        model.Decode(inputs, samplers.view(), {.steps = steps}, std::span(tokens).first(room),
                     std::span(counts).first(rows));
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_EQ(counts[0], 0);
    EXPECT_EQ(texts.sequence(0).length(), 4);
    return status.message();
  };
  const DecodeInput a{&texts.sequence(0), 1};
  const DecodeInput b{&texts.sequence(1), 2};
  EXPECT_EQ(message(a, b, 0), "steps: expected 1 or more, got 0");
  EXPECT_EQ(message(a, b, 3), "tokens: expected 6 (inputs * steps), got 4");
  EXPECT_EQ(message(a, b, 2, 3), "tokens: expected 4 (inputs * steps), got 3");
  EXPECT_EQ(message(a, b, 2, 4, 1), "counts: expected 2 (inputs), got 1");
  EXPECT_EQ(message(a, b, INT64_MAX),
            "tokens: expected 9223372036854775807 (inputs * steps), got 4");
  EXPECT_EQ(message(a, a, 2), "inputs: a sequence appears twice");
  EXPECT_EQ(message(a, {}, 2), "inputs[1]: no sequence");
  EXPECT_EQ(message(a, {&texts.sequence(1), kVocab}, 2),
            "inputs[1]: token 0 is 96, expected 0..95");
  EXPECT_EQ(message(a, {&foreign, 1}, 2), "inputs[1]: a sequence of another model");
  const DecodeInput one[] = {a};
  EXPECT_THAT(
      model.Decode(one, samplers.view(), {}, std::span(tokens).first(1), std::span(counts).first(1))
          .message(),
      HasSubstr("samplers: expected u8 [1, "));
  EXPECT_TRUE(model
                  .Decode({},
                          MutableTensorView(samplers.view().data(), DType::kU8,
                                            {0, samplers.view().dim(1)}),
                          {}, {}, {})
                  .ok());
}

// More rows than are recorded, and than a pass has wanted rows.
TEST_P(Decoding, ManySequences) {
  const Model model = Load(Llama(), {.batch_invariant = true});
  std::vector<std::vector<int32_t>> prompts;
  std::vector<SamplingOptions> sampling;
  for (size_t i = 0; i < 530; ++i) {
    prompts.push_back(Prompt(1 + i % 5));
    sampling.push_back(kSampled);
    sampling.back().seed = i;
  }
  Texts single(model, prompts, sampling);
  const auto expected = single.Step(5);
  // So rare that more than a pass are left after the first step.
  std::vector<int> times(kVocab);
  for (const std::vector<int32_t>& text : expected) ++times[static_cast<size_t>(text[0])];
  int32_t rarest = expected[0][0];
  for (const std::vector<int32_t>& text : expected) {
    if (times[static_cast<size_t>(text[0])] < times[static_cast<size_t>(rarest)]) rarest = text[0];
  }
  ASSERT_LT(times[static_cast<size_t>(rarest)], 18);
  const std::vector<int32_t> stops = {rarest};
  Texts several(model, prompts, sampling);
  const auto texts = several.Decode(5, stops);
  for (size_t i = 0; i < prompts.size(); ++i) {
    auto text = expected[i];
    text.resize(CountUntil(text, stops));
    EXPECT_EQ(texts[i], text) << i;
  }
}

TEST(DecodingThreads, SequencesOfTwoThreadsAreTheirOwn) {
  const TemporaryDirectory directory;
  Write(directory.path(), Llama());
  const Device device = *Device::Open(TestDevice(), {.threads = 2});
  const Model model = *Model::Open(directory.path(), device);
  const auto run = [&](uint64_t seed) {
    SamplingOptions sampling = kSampled;
    sampling.seed = seed;
    Texts texts(model, {Prompt(5)}, {sampling});
    std::vector<int32_t> all;
    for (int i = 0; i < 12; ++i) {
      const auto more = texts.Decode(8)[0];
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  };
  const std::vector<int32_t> expected[] = {run(1), run(2)};
  std::vector<int32_t> got[2];
  std::thread first([&] { got[0] = run(1); });
  std::thread second([&] { got[1] = run(2); });
  first.join();
  second.join();
  EXPECT_EQ(got[0], expected[0]);
  EXPECT_EQ(got[1], expected[1]);
}

/// A remote device that records, whose waits and recordings are counted.
class RecordedDecoding : public ::testing::Test {
 protected:
  void Open(testing::RemoteOptions options = {}, const ModelOptions& model = {}) {
    Write(directory_.path(), Llama());
    options.records = true;
    device_.emplace(testing::OpenRemote(options));
    auto opened = Model::Open(directory_.path(), *device_, model);
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    model_.emplace(*std::move(opened));
  }
  const testing::RemoteBackend& remote() const { return testing::RemoteOf(*device_); }
  TemporaryDirectory directory_;
  std::optional<Device> device_;
  std::optional<Model> model_;
};

TEST_F(RecordedDecoding, APassHasEightSteps) {
  Open();
  Texts texts(*model_, {Prompt(3)}, {{}});
  const auto copies = [&](int64_t steps) {
    const int before = remote().copies();
    texts.Decode(steps);
    return remote().copies() - before;
  };
  EXPECT_EQ(copies(8), 1);
  EXPECT_EQ(copies(20), 3);
  EXPECT_EQ(copies(7), 3);
  EXPECT_EQ(copies(1), 1);
}

// The second pass of a length is recorded, also between those of other lengths.
TEST_F(RecordedDecoding, PassesOfEveryLengthAreRecorded) {
  Open();
  Texts texts(*model_, {Prompt(3)}, {{}});
  const int before = remote().recordings();
  texts.Decode(13);
  EXPECT_EQ(remote().recordings(), before);
  texts.Decode(13);
  EXPECT_EQ(remote().recordings(), before + 3);
  for (int i = 0; i < 5; ++i) texts.Decode(13);
  EXPECT_EQ(remote().recordings(), before + 3);
}

TEST_F(RecordedDecoding, AStopEndsTheCallWithItsPass) {
  Open();
  Texts single(*model_, {Prompt(3)}, {kSampled});
  const auto expected = single.Step(8)[0];
  Texts texts(*model_, {Prompt(3)}, {kSampled});
  const int before = remote().copies();
  texts.Decode(100, {expected[2]});
  EXPECT_EQ(remote().copies() - before, 1);
}

/// With memory for some pages of 256 tokens.
class ShortOfPages : public RecordedDecoding {
 protected:
  void OpenWith(int64_t pages) {
    Write(directory_.path(), Llama());
    int64_t weights = 0;
    const auto checkpoint = Checkpoint::Open(directory_.path());
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
    for (const TensorInfo& tensor : checkpoint->tensors()) {
      weights += tensor.shape.ElementCount() * 2;
    }
    // Keys and values in bf16 of 2 heads of 16 features in 3 layers.
    constexpr int64_t kPage = int64_t{256} * 2 * 2 * 16 * 3 * 2;
    Open({.free_memory = int64_t{1} << 30}, {.device_memory = weights + pages * kPage + kPage / 2});
  }
  /// Decodes two texts until the memory ends, and returns the tokens of each.
  std::vector<int64_t> CountsOf(size_t first, size_t second) {
    const std::vector<std::vector<int32_t>> prompts = {Prompt(first), Prompt(second)};
    Texts both(*model_, prompts, {{}, {}});
    const auto failed = both.TryDecode(8);
    EXPECT_EQ(failed.status().code(), Code::kOutOfMemory);
    EXPECT_THAT(failed.status().message(), HasSubstr("KV cache: "));
    EXPECT_EQ(both.sequence(0).length(), static_cast<int64_t>(first) + both.counts()[0]);
    EXPECT_EQ(both.sequence(1).length(), static_cast<int64_t>(second) + both.counts()[1]);
    return both.counts();
  }
};

TEST_F(ShortOfPages, PassesTakeFewerSteps) {
  OpenWith(2);
  EXPECT_THAT(CountsOf(252, 250), ElementsAre(4, 4));
}

// A page that is reserved in vain is the other sequence's in the next attempt.
TEST_F(ShortOfPages, NoneKeepsAPageThatItDoesNotNeed) {
  OpenWith(3);
  EXPECT_THAT(CountsOf(250, 252), ElementsAre(6, 6));
}

TEST_F(ShortOfPages, ASequenceThatHasEndedReturnsWhatItsPassReserved) {
  OpenWith(2);
  const int32_t stop = Texts(*model_, {Prompt(252)}, {kSampled}).Step(1)[0][0];
  Texts first(*model_, {Prompt(252)}, {kSampled});
  EXPECT_EQ(first.Decode(8, {stop})[0].size(), 1U);
  const Texts second(*model_, {Prompt(4)}, {{}});
}

}  // namespace
}  // namespace marlin::decode_test
