// Layers that predict further tokens (MTP), of small random models: loaded, run as drafts of
// several depths, and measured. tests/integrations/test_drafts.py compares their logits with
// modules of transformers.
#include "marlin/draft.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "../../source_directory.h"
#include "../checkpoint/test_files.h"
#include "../test_device.h"
#include "base/json.h"
#include "engine/batch/sampler_slots.h"
#include "engine/speculation/drafter.h"
#include "engine/speculation/speculation.h"
#include "marlin/checkpoint.h"
#include "marlin/generate.h"
#include "marlin/model.h"
#include "marlin/scheduler.h"
#include "recipe/architecture.h"
#include "remote_backend.h"

namespace marlin::draft_test {
namespace {

using testing::BuildSafetensors;
using ::testing::HasSubstr;
using testing::RandomBf16;
using testing::TemporaryDirectory;
using testing::TestTensor;
using testing::WriteFile;

constexpr int64_t kVocab = 64;
constexpr int64_t kHidden = 64;
const std::vector<int32_t> kTokens = {5, 17, 4, 40, 63, 31, 8, 2, 9, 9, 1, 22};

const Json kLatent = {{"kv_lora_rank", 16}, {"qk_nope_head_dim", 16}, {"qk_rope_head_dim", 8},
                      {"v_head_dim", 16},   {"n_routed_experts", 4},  {"n_shared_experts", 1},
                      {"n_group", 1},       {"topk_group", 1},        {"q_lora_rank", 32}};
const Json kHybrid = {{"head_dim", 16},
                      {"layer_types", {"linear_attention", "full_attention"}},
                      {"linear_num_key_heads", 2},
                      {"linear_num_value_heads", 4},
                      {"linear_key_head_dim", 12},
                      {"linear_value_head_dim", 16},
                      {"num_experts", 4},
                      {"shared_expert_intermediate_size", 48}};

std::map<std::string, Json> Types() {
  return {{"deepseek_v3", kLatent},
          {"kimi_k2", kLatent},
          {"deepseek_v32", kLatent},
          {"glm_moe_dsa", kLatent},
          {"glm4_moe_lite", kLatent},
          {"glm4_moe",
           {{"head_dim", 16},
            {"n_routed_experts", 4},
            {"attention_bias", true},
            {"use_qk_norm", true}}},
          {"qwen3_next", kHybrid},
          {"qwen3_5_text", kHybrid},
          {"qwen3_5_moe_text", kHybrid}};
}

class Drafts : public ::testing::Test {
 protected:
  void Make(const std::string& type) {
    config_ = {{"model_type", type},
               {"hidden_size", kHidden},
               {"intermediate_size", 96},
               {"num_hidden_layers", 2},
               {"vocab_size", kVocab},
               {"num_attention_heads", 4},
               {"num_key_value_heads", 2},
               {"moe_intermediate_size", 32},
               {"num_experts_per_tok", 2},
               {"first_k_dense_replace", 1},
               {"max_position_embeddings", 64},
               {"num_nextn_predict_layers", 1}};
    config_.update(Types().at(type));
    if (type == "glm4_moe_lite" || type.starts_with("qwen")) config_.erase("first_k_dense_replace");
    const auto model = DescribeModel(config_.dump());
    ASSERT_TRUE(model.ok()) << model.status().message();
    tensors_.clear();
    uint32_t seed = 1;
    for (const auto* const list : {&model->tensors, &model->prediction_tensors}) {
      for (const ModelTensor& tensor : *list) {
        tensors_.push_back(RandomBf16(tensor.name, tensor.shape, seed++));
      }
    }
    predicting_ = model->prediction_tensors.size();
  }
  /// Makes a model of one layer whose layer that predicts does the same: the join hands on the
  /// embedding.
  void MakeOwnLayer() {
    Make("glm4_moe");
    config_["num_hidden_layers"] = 1;
    config_["first_k_dense_replace"] = 0;
    const auto described = DescribeModel(config_.dump());
    tensors_.clear();
    for (const ModelTensor& tensor : described->tensors) {
      tensors_.push_back(
          RandomBf16(tensor.name, tensor.shape, static_cast<uint32_t>(tensors_.size())));
    }
    const auto copies = tensors_;
    for (const TestTensor& tensor : copies) {
      const std::string own = "model.layers.0.";
      if (!tensor.name.starts_with(own)) continue;
      tensors_.push_back(tensor);
      tensors_.back().name = "model.layers.1." + tensor.name.substr(own.size());
    }
    const auto add = [&](const std::string& name, const Shape& shape, auto value) {
      TestTensor tensor = RandomBf16("model.layers.1." + name, shape, 1);
      auto* const elements = reinterpret_cast<uint16_t*>(tensor.data.data());
      const int64_t columns = shape[shape.rank() - 1];
      for (int64_t i = 0; i < shape.ElementCount(); ++i) {
        elements[i] = value(i / columns, i % columns) ? 0x3F80 : 0;  // 1 or 0.
      }
      tensors_.push_back(tensor);
    };
    const auto one = [](int64_t, int64_t) { return true; };
    add("enorm.weight", {kHidden}, one);
    add("hnorm.weight", {kHidden}, one);
    // The embedding is the first half.
    add("eh_proj.weight", {kHidden, 2 * kHidden},
        [](int64_t row, int64_t at) { return row == at; });
    for (const TestTensor& tensor : copies) {
      if (tensor.name != "model.norm.weight") continue;
      tensors_.push_back(tensor);
      tensors_.back().name = "model.layers.1.shared_head.norm.weight";
    }
    // Embeddings of a root mean square of 1 are what their norm leaves of them.
    auto* const table = reinterpret_cast<uint16_t*>(tensors_.front().data.data());
    ASSERT_EQ(tensors_.front().name, "model.embed_tokens.weight");
    for (int64_t i = 0; i < kVocab * kHidden; ++i) table[i] = (table[i] & 0x8000) | 0x3F80;
  }
  void Remove(const std::string& end) {
    const auto ends = [&](const TestTensor& tensor) { return tensor.name.ends_with(end); };
    ASSERT_EQ(std::erase_if(tensors_, ends), 1U) << end;
  }
  std::string Write() {
    WriteFile(directory_ / "config.json", config_.dump());
    WriteFile(directory_ / "model.safetensors", BuildSafetensors(tensors_));
    return directory_.path();
  }
  static Result<Model> Open(const std::string& path, bool draft = true) {
    return Model::Open(path, *Device::Open("cpu", {.threads = 2}),
                       {.allow_bf16_activations = false, .draft = draft});
  }
  static std::vector<float> LogitsOf(const Model& model, int64_t depth,
                                     const std::vector<int32_t>& tokens = kTokens) {
    const int64_t rows = std::ssize(tokens) - depth;
    std::vector<float> logits(static_cast<size_t>(rows * kVocab));
    const Status status =
        DraftLogits(model, tokens, depth, {logits.data(), DType::kF32, {rows, kVocab}});
    EXPECT_TRUE(status.ok()) << status.message();
    return logits;
  }
  static std::vector<float> ModelLogits(const Model& model, std::vector<float>* hidden) {
    hidden->resize(kTokens.size() * kHidden);
    std::vector<float> logits(kTokens.size() * kVocab);
    Sequence sequence = *model.NewSequence();
    SequenceInput input{&sequence, kTokens, true};
    input.hidden_out = *hidden;
    const Status status =
        model.Forward({&input, 1}, {logits.data(), DType::kF32, {std::ssize(kTokens), kVocab}});
    EXPECT_TRUE(status.ok()) << status.message();
    return logits;
  }
  /// Feeds one token and the hidden state before it, and returns logits and the next hidden state.
  static std::vector<float> Step(const Model& draft, Sequence* sequence, int32_t token,
                                 std::vector<float>* hidden) {
    std::vector<float> logits(kVocab);
    std::vector<float> next(kHidden);
    SequenceInput input{sequence, {&token, 1}};
    input.hidden = *hidden;
    input.hidden_out = next;
    const Status status = draft.Forward({&input, 1}, {logits.data(), DType::kF32, {1, kVocab}});
    EXPECT_TRUE(status.ok()) << status.message();
    *hidden = next;
    return logits;
  }

  TemporaryDirectory directory_;
  Json config_;
  std::vector<TestTensor> tensors_;
  size_t predicting_ = 0;
};

double Difference(std::span<const float> a, std::span<const float> b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    most = std::max(most, std::abs(double{a[i]} - double{b[i]}));
  }
  return most;
}

std::span<const float> Row(const std::vector<float>& of, int64_t row, int64_t width) {
  return std::span(of).subspan(static_cast<size_t>(row * width), static_cast<size_t>(width));
}

size_t Likely(std::span<const float> logits) {
  return static_cast<size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

/// Drafting token by token gives the same as DraftLogits.
TEST_F(Drafts, OfEveryTypeFollowTheModel) {
  for (const auto& [type, own] : Types()) {
    SCOPED_TRACE(type);
    Make(type);
    const auto model = Open(Write());
    ASSERT_TRUE(model.ok()) << model.status().message();
    const Model draft = *model->draft();
    EXPECT_EQ(draft.info().layers, 1);
    EXPECT_GT(draft.info().parameters, 2 * kHidden * kHidden);
    std::vector<float> hidden;
    ModelLogits(*model, &hidden);
    const std::vector<float> first = LogitsOf(*model, 1);
    const std::vector<float> third = LogitsOf(*model, 3);
    for (const float logit : first) EXPECT_TRUE(std::isfinite(logit));
    Sequence sequence = *draft.NewSequence();
    for (int64_t t = 0; t + 3 < std::ssize(kTokens); ++t) {
      ASSERT_TRUE(sequence.Truncate(t).ok());
      const auto given = Row(hidden, t, kHidden);
      std::vector<float> state(given.begin(), given.end());
      const auto at = static_cast<size_t>(t);
      const auto one = Step(draft, &sequence, kTokens[at + 1], &state);
      Step(draft, &sequence, kTokens[at + 2], &state);
      const auto three = Step(draft, &sequence, kTokens[at + 3], &state);
      EXPECT_LT(Difference(one, Row(first, t, kVocab)), 1e-4) << t;
      EXPECT_LT(Difference(three, Row(third, t, kVocab)), 1e-4) << t;
      EXPECT_GT(Difference(one, three), 1e-2) << t;
      // The next token goes on from depth 1.
      ASSERT_TRUE(sequence.Truncate(t + 1).ok());
    }
  }
}

/// Three sequences of a draft, with hidden states and samplers of their own.
class DraftTexts {
 public:
  explicit DraftTexts(const Model& draft)
      : draft_(draft), slots_(*SamplerSlots::Make(draft.device(), kVocab, kCount)) {
    const SamplingOptions options[kCount] = {{}, {.temperature = 1.0F, .seed = 3}, {}};
    for (size_t i = 0; i < kCount; ++i) {
      const SamplerSlots::Reset reset{static_cast<int64_t>(i), &options[i], kTokens};
      EXPECT_TRUE(slots_.ResetAll({&reset, 1}).ok());
      EXPECT_TRUE(draft.device().Synchronize().ok());
      sequences_.push_back(*draft.NewSequence());
      std::vector<float>& hidden = hidden_.emplace_back(kHidden);
      for (size_t k = 0; k < hidden.size(); ++k) {
        hidden[k] = std::sin(static_cast<float>(k + 50 * i));
      }
    }
  }

  /// Calls of ForwardAndSample, which hand the hidden states on.
  std::vector<std::vector<int32_t>> Step(int64_t steps) {
    std::vector<std::vector<int32_t>> texts(kCount);
    for (int64_t step = 0; step < steps; ++step) {
      const std::vector<int32_t> fed = next_;
      std::vector<SequenceInput> inputs;
      for (size_t i = 0; i < kCount; ++i) {
        inputs.push_back({.sequence = &sequences_[i],
                          .tokens = {&fed[i], 1},
                          .hidden = hidden_[i],
                          .hidden_out = hidden_[i]});
      }
      const Status status = draft_.ForwardAndSample(inputs, slots_.First(kCount), next_);
      EXPECT_TRUE(status.ok()) << status.message();
      for (size_t i = 0; i < kCount; ++i) texts[i].push_back(next_[i]);
    }
    return texts;
  }
  /// A call of Decode.
  std::vector<std::vector<int32_t>> Decode(int64_t steps, const std::vector<int32_t>& stops = {}) {
    std::vector<DecodeInput> inputs;
    for (size_t i = 0; i < kCount; ++i) {
      inputs.push_back({&sequences_[i], next_[i], hidden_[i], hidden_[i]});
    }
    std::vector<int32_t> tokens(static_cast<size_t>(kCount * steps));
    std::vector<int64_t> counts(kCount);
    const Status status =
        draft_.Decode(inputs, slots_.First(kCount), {steps, stops}, tokens, counts);
    EXPECT_TRUE(status.ok()) << status.message();
    std::vector<std::vector<int32_t>> texts(kCount);
    for (size_t i = 0; i < kCount; ++i) {
      const auto* const first = tokens.data() + static_cast<int64_t>(i) * steps;
      texts[i].assign(first, first + counts[i]);
      next_[i] = texts[i].back();
    }
    return texts;
  }
  int64_t length(size_t i) const { return sequences_[i].length(); }

 private:
  static constexpr int64_t kCount = 3;
  const Model& draft_;
  SamplerSlots slots_;
  std::vector<Sequence> sequences_;
  std::vector<std::vector<float>> hidden_;
  std::vector<int32_t> next_ = {kTokens[0], kTokens[1], kTokens[2]};
};

/// Several steps on a device hand the draft's hidden states on, as single calls do, also where a
/// sequence ends before others.
TEST_F(Drafts, DecodeAsSingleSteps) {
  for (const std::string device : {TestDevice(), "remote"}) {
    for (const std::string type : {"deepseek_v3", "glm4_moe", "qwen3_next"}) {
      SCOPED_TRACE(device + ", " + type);
      // The remote device's fused runs have no output gates.
      if (device == "remote" && type == "qwen3_next") continue;
      Make(type);
      const Device on = device == "remote" ? testing::OpenRemote({.records = true})
                                           : *Device::Open(device, {.threads = 2});
      const auto model = Model::Open(Write(), on, {.allow_bf16_activations = false, .draft = true});
      ASSERT_TRUE(model.ok()) << model.status().message();
      const Model draft = *model->draft();
      const auto texts = DraftTexts(draft).Step(30);
      EXPECT_NE(texts[0], texts[1]);
      EXPECT_GT(std::set(texts[0].begin(), texts[0].end()).size(), 3U);
      const auto part = [&](size_t i, size_t first, size_t count) {
        const auto from = texts[i].begin() + static_cast<std::ptrdiff_t>(first);
        return std::vector<int32_t>(from, from + static_cast<std::ptrdiff_t>(count));
      };
      // Passes of eight, of four, of two steps and of one; the next call goes on.
      DraftTexts decoded(draft);
      const auto first = decoded.Decode(15);
      const auto second = decoded.Decode(15);
      for (size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(first[i], part(i, 0, 15)) << i;
        EXPECT_EQ(second[i], part(i, 15, 15)) << i;
        EXPECT_EQ(decoded.length(i), 30) << i;
      }
      if (device == "remote") {
        EXPECT_GT(testing::RemoteOf(on).recordings(), 0);
      }
      // The second token of the second text ends it, and others where they have it.
      DraftTexts stopped(draft);
      const int32_t stop = texts[1][1];
      const auto ended = stopped.Decode(30, {stop});
      for (size_t i = 0; i < 3; ++i) {
        const auto at = std::find(texts[i].begin(), texts[i].end(), stop);
        const auto count = static_cast<size_t>(std::min<int64_t>(at - texts[i].begin() + 1, 30));
        EXPECT_EQ(ended[i], part(i, 0, count)) << i;
        EXPECT_EQ(stopped.length(i), std::ssize(ended[i])) << i;
      }
      EXPECT_LT(ended[1].size(), ended[0].size());
    }
  }
}

TEST_F(Drafts, AreQuantizedByTheRecipe) {
  for (const std::string type : {"deepseek_v3", "glm4_moe", "qwen3_5_moe_text"}) {
    SCOPED_TRACE(type);
    Make(type);
    QuantizeCheckpointOptions options;
    options.recipe = *MixedPrecisionConfig::Uniform("s8/g16");
    options.overwrite = true;
    const std::string quantized = directory_ / "quantized";
    ASSERT_TRUE(QuantizeCheckpoint(Write(), quantized, options).ok());
    const auto checkpoint = Checkpoint::Open(quantized);
    const std::string attention = type.starts_with("qwen")
                                      ? "mtp.layers.0.self_attn.o_proj.weight"
                                      : "model.layers.2.self_attn.o_proj.weight";
    const auto& modules = checkpoint->modules();
    EXPECT_TRUE(std::any_of(modules.begin(), modules.end(), [&](const QuantizedModule& module) {
      return module.name == attention;
    }));
    const auto plain = LogitsOf(*Open(Write()), 2);
    const auto rounded = Open(quantized);
    ASSERT_TRUE(rounded.ok()) << rounded.status().message();
    const auto logits = LogitsOf(*rounded, 2);
    double size = 0;
    for (const float logit : plain) size = std::max(size, std::abs(double{logit}));
    EXPECT_LT(Difference(plain, logits), 0.2 * size);
    EXPECT_GT(Difference(plain, logits), 0);
  }
}

TEST_F(Drafts, NeedTheLayer) {
  const auto message = [&](const std::string& path) {
    const auto model = Open(path);
    EXPECT_FALSE(model.ok());
    return std::string(model.status().message());
  };
  for (const auto& [type, missing] : std::map<std::string, std::string>{
           {"deepseek_v3", "model.layers.2.hnorm.weight"},
           {"glm4_moe", "model.layers.2.shared_head.norm.weight"},
           {"glm4_moe_lite", "model.layers.2.mlp.experts.3.down_proj.weight"},
           {"qwen3_next", "mtp.pre_fc_norm_embedding.weight"},
           {"qwen3_5_text", "mtp.norm.weight"}}) {
    SCOPED_TRACE(type);
    Make(type);
    Remove(missing);
    const std::string path = Write();
    EXPECT_THAT(message(path), HasSubstr(missing));
    // The model itself runs without.
    EXPECT_TRUE(Open(path, false).ok());
    tensors_.resize(tensors_.size() - (predicting_ - 1));
    EXPECT_THAT(message(Write()), HasSubstr("has no layer that predicts further tokens (MTP)"));
  }
  EXPECT_THAT(message(SourceDirectory() + "/examples/tiny-qwen3-moe"),
              HasSubstr("has no layer that predicts further tokens (MTP)"));
  Make("deepseek_v3");
  config_["num_nextn_predict_layers"] = 2;
  EXPECT_THAT(message(Write()), HasSubstr("num_nextn_predict_layers is 2; only one"));
}

/// Copies of the embedding and the head are not needed, nor does a type need the key.
TEST_F(Drafts, ShareTheModelsEmbeddingAndHead) {
  Make("glm4_moe");
  const auto all = LogitsOf(*Open(Write()), 1);
  Remove("model.layers.2.embed_tokens.weight");
  Remove("model.layers.2.shared_head.head.weight");
  EXPECT_EQ(LogitsOf(*Open(Write()), 1), all);
  Make("qwen3_next");
  const auto with_key = LogitsOf(*Open(Write()), 1);
  config_.erase("num_nextn_predict_layers");
  EXPECT_EQ(LogitsOf(*Open(Write()), 1), with_key);
  config_["mtp_num_hidden_layers"] = 1;
  EXPECT_EQ(LogitsOf(*Open(Write()), 1), with_key);
  config_["mtp_use_dedicated_embeddings"] = true;
  EXPECT_THAT(std::string(Open(Write()).status().message()),
              HasSubstr("mtp_use_dedicated_embeddings"));
}

TEST_F(Drafts, AcceptanceCountsEqualTokens) {
  Make("glm4_moe");
  const auto model = Open(Write());
  ASSERT_TRUE(model.ok());
  std::vector<float> hidden;
  const std::vector<float> said = ModelLogits(*model, &hidden);
  const std::vector<int32_t> text(kTokens.begin(), kTokens.end());
  // One window of all but the last token.
  const auto result = MeasureAcceptance(*model, text, 3, {.window = std::ssize(kTokens) - 1});
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result->windows, 1);
  ASSERT_EQ(result->depths.size(), 3U);
  for (int64_t depth = 1; depth <= 3; ++depth) {
    const std::vector<float> guesses = LogitsOf(*model, depth);
    const int64_t positions = std::ssize(kTokens) - 1 - depth;
    int64_t same = 0;
    for (int64_t t = 0; t < positions; ++t) {
      if (Likely(Row(guesses, t, kVocab)) == Likely(Row(said, t + depth, kVocab))) ++same;
    }
    const DepthAcceptance& measured = result->depths[static_cast<size_t>(depth) - 1];
    EXPECT_EQ(measured.positions, positions);
    EXPECT_DOUBLE_EQ(measured.accepted, static_cast<double>(same) / static_cast<double>(positions));
  }
  // A window that overlaps counts only the last `stride` targets.
  const auto strided = MeasureAcceptance(*model, text, 2, {.window = 8, .stride = 3});
  ASSERT_TRUE(strided.ok());
  EXPECT_EQ(strided->windows, 2);
  EXPECT_EQ(strided->depths[0].positions, 7 + 3);
  EXPECT_EQ(strided->depths[1].positions, 6 + 3);
  const auto message = [](const auto& failed) { return std::string(failed.status().message()); };
  EXPECT_THAT(message(MeasureAcceptance(*model, text, 4, {.window = 3})),
              HasSubstr("window: too short for 4 guesses in a row"));
  EXPECT_THAT(message(MeasureAcceptance(*model, text, 0)), HasSubstr("depth: expected 1..16"));
}

/// A layer that does what the model's only one does with the same input says what the model says.
TEST_F(Drafts, OfTheModelsOwnLayerAreItsOwnLogits) {
  MakeOwnLayer();
  const auto model = Open(Write());
  ASSERT_TRUE(model.ok()) << model.status().message();
  // Without the text's first token, which the layer is not given.
  std::vector<float> hidden;
  const std::vector<float> said = ModelLogits(*model, &hidden);
  const Model draft = *model->draft();
  Sequence sequence = *draft.NewSequence();
  std::vector<float> logits(kTokens.size() * kVocab);
  SequenceInput input{&sequence, kTokens, true};
  input.hidden = hidden;
  ASSERT_TRUE(
      draft.Forward({&input, 1}, {logits.data(), DType::kF32, {std::ssize(kTokens), kVocab}}).ok());
  EXPECT_LT(Difference(logits, said), 1e-3);
}

/// Where a device fuses operations, it does so in passes that give hidden states, too.
TEST_F(Drafts, HiddenStatesComeAfterFusedRuns) {
  Make("glm4_moe");
  const std::string path = Write();
  std::vector<float> wanted;
  const std::vector<float> said = ModelLogits(*Open(path), &wanted);
  const Device remote = testing::OpenRemote({.plans_experts = true});
  const auto model = Model::Open(path, remote, {.allow_bf16_activations = false, .draft = true});
  ASSERT_TRUE(model.ok()) << model.status().message();
  const int before = testing::RemoteOf(remote).remote_decoder().fused_calls();
  std::vector<float> hidden;
  EXPECT_LT(Difference(ModelLogits(*model, &hidden), said), 1e-3);
  EXPECT_LT(Difference(hidden, wanted), 1e-3);
  EXPECT_GT(testing::RemoteOf(remote).remote_decoder().fused_calls(), before);
}

/// Guesses of the layer change no text, whatever they are worth.
TEST_F(Drafts, GiveTheSchedulerTheSameTexts) {
  for (const std::string type : {"deepseek_v3", "glm4_moe", "qwen3_next", "own layer"}) {
    SCOPED_TRACE(type);
    if (type == "own layer") {
      MakeOwnLayer();
    } else {
      Make(type);
    }
    const auto model = Model::Open(Write(), *Device::Open("cpu", {.threads = 2}),
                                   {.batch_invariant = true, .draft = true});
    ASSERT_TRUE(model.ok()) << model.status().message();
    SchedulerOptions options{.prefill_tokens = 5, .prefix_cache = false};
    options.speculation = {.tokens = 3, .always = true, .source = DraftSource::kLayer};
    auto scheduler = Scheduler::Make(*model, options);
    ASSERT_TRUE(scheduler.ok()) << scheduler.status().message();
    std::map<int64_t, Request> requests;
    std::map<int64_t, std::vector<int32_t>> texts;
    std::vector<Event> events;
    const auto step = [&] {
      ASSERT_TRUE(scheduler->Step(std::chrono::seconds(0), &events).ok());
      for (const Event& event : events) {
        EXPECT_TRUE(event.status.ok()) << event.status.message();
        auto& text = texts[event.id];
        text.insert(text.end(), event.tokens.begin(), event.tokens.end());
      }
    };
    for (size_t i = 0; i < 4; ++i) {
      Request request;
      request.prompt.assign(kTokens.begin() + static_cast<std::ptrdiff_t>(i), kTokens.end());
      request.options.max_tokens = 24;
      request.options.sampling = {.temperature = i == 3 ? 0.5F : 0.0F, .seed = i};
      const auto id = scheduler->Submit(request);
      ASSERT_TRUE(id.ok() && id->has_value());
      requests[**id] = request;
      step();
    }
    while (scheduler->statistics().running > 0) step();
    for (const auto& [id, request] : requests) {
      const auto alone = Generate(*model, request.prompt, request.options);
      ASSERT_TRUE(alone.ok());
      EXPECT_EQ(texts[id], alone->token_ids) << id;
    }
    const SchedulerStatistics end = scheduler->statistics();
    EXPECT_GT(end.draft_tokens, 0);
    EXPECT_EQ(end.pages_used, 0);
    if (type == "own layer") {
      EXPECT_GT(end.accepted_tokens, 20);
    }
  }
}

/// Requests that share a prefix, of which the layer sees the rest only, have the same texts, too.
TEST_F(Drafts, GoOnAfterSharedPages) {
  for (const std::string type : {"own layer", "qwen3_next"}) {
    SCOPED_TRACE(type);
    if (type == "own layer") {
      MakeOwnLayer();
    } else {
      Make(type);
    }
    config_["max_position_embeddings"] = 2048;
    const auto model = Model::Open(Write(), *Device::Open("cpu", {.threads = 2}),
                                   {.batch_invariant = true, .draft = true});
    ASSERT_TRUE(model.ok()) << model.status().message();
    SchedulerOptions options;
    options.speculation = {.tokens = 3, .always = true, .source = DraftSource::kLayer};
    auto scheduler = Scheduler::Make(*model, options);
    ASSERT_TRUE(scheduler.ok()) << scheduler.status().message();
    std::vector<int32_t> prompt;
    while (prompt.size() < 600) prompt.insert(prompt.end(), kTokens.begin(), kTokens.end());
    int64_t cached = 0;
    for (int32_t last = 0; last < 3; ++last) {
      Request request;
      request.prompt = prompt;
      request.prompt.push_back(last);
      request.options = {.max_tokens = 24, .ignore_eos = true};
      ASSERT_TRUE(scheduler->Submit(request).ok());
      std::vector<int32_t> text;
      std::vector<Event> events;
      do {
        ASSERT_TRUE(scheduler->Step(std::chrono::seconds(0), &events).ok());
        for (const Event& event : events) {
          EXPECT_TRUE(event.status.ok()) << event.status.message();
          text.insert(text.end(), event.tokens.begin(), event.tokens.end());
          if (event.last()) cached += event.cached_tokens;
        }
      } while (scheduler->statistics().running > 0);
      const auto alone = Generate(*model, request.prompt, request.options);
      ASSERT_TRUE(alone.ok()) << alone.status().message();
      EXPECT_EQ(text, alone->token_ids) << last;
    }
    EXPECT_EQ(cached, 2 * 512);
    EXPECT_GT(scheduler->statistics().draft_tokens, 0);
  }
}

/// The layer guesses on the test's device, too, and after a sequence of which it has not seen the
/// beginning.
TEST_F(Drafts, GenerateTheSameTexts) {
  MakeOwnLayer();
  const std::string path = Write();
  for (const std::string& name : std::set<std::string>{"cpu", TestDevice()}) {
    SCOPED_TRACE(name);
    const Device device = *Device::Open(name, {.threads = 2});
    const auto model = Model::Open(path, device, {.batch_invariant = true, .draft = true});
    ASSERT_TRUE(model.ok()) << model.status().message();
    for (const float temperature : {0.0F, 0.3F}) {
      GenerateOptions options{.max_tokens = 40, .sampling = {.temperature = temperature}};
      const auto plain = Generate(*model, kTokens, options);
      ASSERT_TRUE(plain.ok()) << plain.status().message();
      options.speculation = {.tokens = 3, .source = DraftSource::kLayer};
      for (const bool always : {true, false}) {
        options.speculation.always = always;
        const auto made = Generate(*model, kTokens, options);
        ASSERT_TRUE(made.ok()) << made.status().message();
        EXPECT_EQ(made->token_ids, plain->token_ids);
        if (always) {
          EXPECT_GT(made->drafts.accepted, made->drafts.drafted / 3);
        }
      }
      options.speculation.always = true;
      Sequence sequence = *model->NewSequence();
      const SequenceInput begin{&sequence, std::span(kTokens).first(5)};
      std::vector<float> logits(kVocab);
      ASSERT_TRUE(model->Forward({&begin, 1}, {logits.data(), DType::kF32, {1, kVocab}}).ok());
      const auto rest = Generate(*model, &sequence, kTokens, options);
      ASSERT_TRUE(rest.ok()) << rest.status().message();
      EXPECT_EQ(rest->token_ids, plain->token_ids);
      EXPECT_GT(rest->drafts.drafted, 0);
    }
  }
}

/// With one guess at a time, a pass accepts it where DraftLogits says the text's next token.
/// Texts that are guessed together have the guesses that they would have alone.
TEST_F(Drafts, AreAsManyAsEachTextWants) {
  MakeOwnLayer();
  const auto model = Open(Write());
  ASSERT_TRUE(model.ok());
  const auto speculation = Speculation::Make(*model, {.tokens = 6, .source = DraftSource::kLayer});
  ASSERT_TRUE(speculation.ok()) << speculation.status().message();
  const std::vector<int64_t> most = {1, 4, 2};
  const auto guess = [&](const std::vector<size_t>& texts) {
    std::vector<std::unique_ptr<Drafter>> drafters;
    std::vector<GuessRequest> requests;
    for (const size_t i : texts) {
      const auto text = std::span(kTokens).subspan(i);
      const auto fed = text.first(text.size() - 1);
      Drafter& drafter = *drafters.emplace_back(speculation->NewDrafter());
      EXPECT_TRUE(drafter.Restart(0).ok());
      Sequence sequence = *model->NewSequence();
      SequenceInput input{.sequence = &sequence, .tokens = fed};
      input.hidden_out = drafter.Receive(std::ssize(fed));
      std::vector<float> logits(kVocab);
      EXPECT_TRUE(model->Forward({&input, 1}, {logits.data(), DType::kF32, {1, kVocab}}).ok());
      drafter.Keep(std::ssize(fed));
      requests.push_back({.drafter = &drafter, .tokens = text, .most = most[i]});
    }
    EXPECT_TRUE(drafters.front()->GuessAll(requests).ok());
    std::vector<std::vector<int32_t>> guesses;
    for (const GuessRequest& request : requests) guesses.push_back(request.guess);
    return guesses;
  };
  const auto together = guess({0, 1, 2});
  for (const size_t i : {0, 1, 2}) {
    EXPECT_EQ(std::ssize(together[i]), most[i]);
    EXPECT_EQ(guess({i}).front(), together[i]) << i;
  }
}

TEST_F(Drafts, AreAcceptedWhereTheyAreRight) {
  for (const std::string type : {"deepseek_v3", "own layer"}) {
    SCOPED_TRACE(type);
    if (type == "own layer") {
      MakeOwnLayer();
    } else {
      Make(type);
    }
    const auto model = Model::Open(Write(), *Device::Open("cpu", {.threads = 2}),
                                   {.batch_invariant = true, .draft = true});
    ASSERT_TRUE(model.ok()) << model.status().message();
    SchedulerOptions options{.prefill_tokens = 5, .prefix_cache = false};
    options.speculation = {.tokens = 1, .always = true, .source = DraftSource::kLayer};
    auto scheduler = Scheduler::Make(*model, options);
    ASSERT_TRUE(scheduler.ok()) << scheduler.status().message();
    Request request;
    request.prompt = kTokens;
    request.options.max_tokens = 40;
    ASSERT_TRUE(scheduler->Submit(request).ok());
    std::vector<int32_t> text = kTokens;
    std::vector<Event> events;
    do {
      ASSERT_TRUE(scheduler->Step(std::chrono::seconds(0), &events).ok());
      for (const Event& event : events) {
        text.insert(text.end(), event.tokens.begin(), event.tokens.end());
      }
    } while (scheduler->statistics().running > 0);
    ASSERT_EQ(std::ssize(text), std::ssize(kTokens) + 40);
    const std::vector<float> logits = LogitsOf(*model, 1, text);
    int64_t drafts = 0;
    int64_t accepted = 0;
    // From the token that was sampled last; the last one of the text is not guessed.
    for (int64_t last = std::ssize(kTokens); last + 2 < std::ssize(text); ++last) {
      ++drafts;
      const auto guess = static_cast<int32_t>(Likely(Row(logits, last - 1, kVocab)));
      if (guess != text[static_cast<size_t>(last) + 1]) continue;
      ++accepted;
      ++last;
    }
    const SchedulerStatistics end = scheduler->statistics();
    EXPECT_EQ(end.draft_tokens, drafts);
    EXPECT_EQ(end.accepted_tokens, accepted);
    if (type == "own layer") {
      EXPECT_GT(accepted, 5);
    }
  }
}

TEST_F(Drafts, NeedASchedulerThatCanUseThem) {
  const auto message = [](const Model& model, const SchedulerOptions& options) {
    return std::string(Scheduler::Make(model, options).status().message());
  };
  SchedulerOptions options{.prefix_cache = false};
  options.speculation.source = DraftSource::kLayer;
  Make("glm4_moe");
  const auto model = Open(Write());
  EXPECT_EQ(message(*model, options), "speculation.tokens: expected 1 or more, got 0");
  options.speculation.tokens = 2;
  EXPECT_EQ(message(*model, options), "");
  EXPECT_THAT(message(*Open(Write(), false), options),
              HasSubstr("speculation: draft: the model was opened without"));
  // So is one of a model with recurrent states.
  Make("qwen3_5_text");
  EXPECT_EQ(message(*Open(Write()), options), "");
}

TEST_F(Drafts, RefuseInputsWithoutHiddenStates) {
  Make("qwen3_5_text");
  const std::string path = Write();
  const auto model = Open(path);
  ASSERT_TRUE(model.ok());
  const Model draft = *model->draft();
  std::vector<float> logits(kVocab);
  const MutableTensorView out(logits.data(), DType::kF32, {1, kVocab});
  const int32_t token = 3;
  std::vector<float> hidden(kHidden);
  const auto message = [&](const Model& of, const SequenceInput& input) {
    const Status status = of.Forward({&input, 1}, out);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return std::string(status.message());
  };
  Sequence of_draft = *draft.NewSequence();
  EXPECT_THAT(message(draft, {&of_draft, {&token, 1}}),
              HasSubstr("inputs[0]: hidden: expected 64 elements, got 0"));
  Sequence of_model = *model->NewSequence();
  SequenceInput input{&of_model, {&token, 1}};
  EXPECT_THAT(message(draft, input), HasSubstr("a sequence of another model"));
  input.hidden = hidden;
  EXPECT_THAT(message(*model, input), HasSubstr("hidden: expected 0 elements, got 64"));
  const SamplerSlots slots = *SamplerSlots::Make(draft.device(), kVocab, 1);
  const DecodeInput next{&of_draft, token};
  int32_t sampled = 0;
  int64_t count = 0;
  const Status decoded = draft.Decode({&next, 1}, slots.First(1), {}, {&sampled, 1}, {&count, 1});
  EXPECT_THAT(std::string(decoded.message()),
              HasSubstr("inputs[0]: hidden: expected 64 elements, got 0"));
  input.hidden = {};
  input.hidden_out = std::span(hidden).first(3);
  EXPECT_THAT(message(*model, input), HasSubstr("hidden_out: expected 64 elements, got 3"));
  const auto plain = Open(path, false);
  Sequence of_plain = *plain->NewSequence();
  input = {&of_plain, {&token, 1}};
  input.hidden_out = hidden;
  EXPECT_THAT(message(*plain, input), HasSubstr("hidden_out: needs a model that was opened"));
  EXPECT_EQ(plain->draft().status().code(), Code::kInvalidArgument);
  EXPECT_THAT(std::string(DraftLogits(*plain, kTokens, 1, out).message()), HasSubstr("draft: "));
  EXPECT_THAT(std::string(DraftLogits(*model, kTokens, 1, out).message()),
              HasSubstr("logits: expected contiguous f32 [11, 64]"));
  EXPECT_THAT(std::string(DraftLogits(*model, {&token, 1}, 1, out).message()),
              HasSubstr("tokens: expected more than 1 (the depth), got 1"));
}

}  // namespace
}  // namespace marlin::draft_test
