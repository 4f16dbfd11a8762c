// The persistent decode kernel against the step's operations one by one, and both against fp32.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "../../checkpoint/test_files.h"
#include "base/json.h"
#include "marlin/checkpoint.h"
#include "marlin/device.h"
#include "marlin/model.h"
#include "recipe/architecture.h"

namespace marlin::persistent_gpu_test {
namespace {

using testing::BuildSafetensors;
using testing::RandomBf16;
using testing::TemporaryDirectory;
using testing::TestTensor;
using testing::WriteFile;

constexpr int64_t kVocab = 128;

/// The deviation of a tensor's random numbers: layers add about as much as there was before.
float ScaleOf(const ModelTensor& tensor) {
  const int rank = tensor.shape.rank();
  if (rank < 2) return 1.0F;
  return tensor.name.find("embed") != std::string::npos
             ? 1.0F
             : 1.0F / std::sqrt(static_cast<float>(tensor.shape[rank - 1]));
}

/// A model, the format of its matrices, and the element type of its KV cache, if not the default.
struct Case {
  std::string name;
  Json config;
  std::string format;
  std::optional<DType> kv_cache = std::nullopt;
  int most_rows = 8;  ///< That fit in an H200's shared memory, at least.
};

Json Config(const std::string& type, const Json& changes) {
  Json config = {{"model_type", type},
                 {"hidden_size", 256},
                 {"intermediate_size", 512},
                 {"num_hidden_layers", 3},
                 {"vocab_size", kVocab},
                 {"num_attention_heads", 8},
                 {"num_key_value_heads", 2},
                 {"head_dim", 64},
                 {"moe_intermediate_size", 96},
                 {"num_experts_per_tok", 3},
                 {"max_position_embeddings", 4096}};
  config.update(changes);
  return config;
}

/// Gated delta nets, and two layers with attention: a run ends before each, and begins after it.
Json Hybrid(const std::string& type, int features, const Json& changes) {
  Json config = Config(type, {{"num_hidden_layers", 5},
                              {"layer_types",
                               {"linear_attention", "linear_attention", "full_attention",
                                "linear_attention", "full_attention"}},
                              {"linear_num_key_heads", 2},
                              {"linear_num_value_heads", 4},
                              {"linear_key_head_dim", features},
                              {"linear_value_head_dim", features}});
  config.update(changes);
  return config;
}

/// Shared experts of models with plain attention: as wide as the others, or as several of them.
std::vector<Case> SharedCases() {
  const Json gated = {{"num_experts", 16}, {"shared_expert_intermediate_size", 96}};
  Json wide = gated;
  wide.update({{"moe_intermediate_size", 128}, {"shared_expert_intermediate_size", 384}});
  Json dense_layers = gated;
  dense_layers.update({{"mlp_only_layers", {1}}, {"norm_topk_prob", true}});
  const Json plain = {{"n_routed_experts", 16}, {"n_shared_experts", 1}};
  Json glm = plain;
  glm["use_qk_norm"] = true;
  Json groups = glm;
  groups.update({{"n_group", 4}, {"topk_group", 2}, {"routed_scaling_factor", 2.5}});
  // Teams of four warps in attention, and of eight; several blocks of keys for each.
  Json large = glm;
  large.update({{"n_routed_experts", 8},
                {"hidden_size", 5120},
                {"num_hidden_layers", 2},
                {"num_key_value_heads", 8},
                {"head_dim", 128}});
  Json larger = large;
  larger["hidden_size"] = 6656;
  const Json ernie = {{"num_experts", 16}, {"moe_intermediate_size", 128}, {"n_shared_experts", 2}};
  Json dots = plain;
  dots.update({{"n_shared_experts", 2},
               {"moe_intermediate_size", 128},
               {"sliding_window", 40},
               {"max_window_layers", 1},
               {"first_k_dense_replace", 2}});
  // Norms after RoPE.
  const Json hunyuan = {{"num_experts", 16}, {"intermediate_size", 96}};
  return {
      {"qwen2_moe", Config("qwen2_moe", gated), "fp4_e2m1/g32"},
      {"qwen2_moe_wide", Config("qwen2_moe", wide), "default_moe"},
      {"qwen2_moe_dense", Config("qwen2_moe", dense_layers), "u4/g32"},
      {"glm4_moe", Config("glm4_moe", glm), "default_moe"},
      {"glm4_moe_groups", Config("glm4_moe", groups), "fp4_e2m1/g128"},
      {"glm4_moe_fp8_cache", Config("glm4_moe", glm), "fp4_e2m1/g32", DType::kF8E4M3},
      {"glm4_moe_four_warps", Config("glm4_moe", large), "fp4_e2m1/g128"},
      {"glm4_moe_eight_warps", Config("glm4_moe", larger), "fp4_e2m1/g128", std::nullopt, 6},
      {"glm4_moe_four_warps_fp8_cache", Config("glm4_moe", large), "fp4_e2m1/g128", DType::kF8E4M3},
      {"ernie4_5_moe", Config("ernie4_5_moe", ernie), "s8/g128"},
      {"dots1", Config("dots1", dots), "default_moe"},
      {"solar_open", Config("solar_open", plain), "fp8_e4m3/g128"},
      {"hunyuan_v1_moe", Config("hunyuan_v1_moe", hunyuan), "fp4_e2m1/g64"},
      {"hunyuan_v1_dense", Config("hunyuan_v1_dense", {{"head_dim", 128}}), "fp4_e2m1/g128"},
  };
}

/// Latent attention, between which the kernel runs: queries of one projection, or of two.
Json Latent(const std::string& type, const Json& changes) {
  Json config = Config(type, {{"num_key_value_heads", 8},
                              {"q_lora_rank", nullptr},
                              {"kv_lora_rank", 96},
                              {"qk_nope_head_dim", 32},
                              {"qk_rope_head_dim", 16},
                              {"v_head_dim", 48},
                              {"n_routed_experts", 16},
                              {"n_shared_experts", 1},
                              {"first_k_dense_replace", 1},
                              {"n_group", 1},
                              {"topk_group", 1},
                              {"num_nextn_predict_layers", 0}});
  config.erase("head_dim");
  config.update(changes);
  return config;
}

std::vector<Case> LatentCases() {
  const Json greedy = {{"topk_method", "greedy"}, {"first_k_dense_replace", 0}};
  const Json wide = {{"moe_intermediate_size", 128}, {"n_shared_experts", 2}};
  const Json groups = {
      {"q_lora_rank", 64}, {"n_group", 4}, {"topk_group", 2}, {"routed_scaling_factor", 2.5}};
  const Json of_rank = {{"q_lora_rank", 200}, {"hidden_size", 320}};
  const Json dense = {{"q_lora_rank", 64}, {"first_k_dense_replace", 3}};
  Json by_groups = groups;
  by_groups["topk_method"] = "group_limited_greedy";
  // The sizes of Moonlight, and of a model with several k-tiles of queries' latents.
  const Json large = {{"hidden_size", 2048},       {"num_attention_heads", 16},
                      {"num_key_value_heads", 16}, {"kv_lora_rank", 512},
                      {"qk_nope_head_dim", 128},   {"qk_rope_head_dim", 64},
                      {"v_head_dim", 128},         {"moe_intermediate_size", 1408},
                      {"n_shared_experts", 2},     {"num_hidden_layers", 2}};
  Json large_of_rank = large;
  large_of_rank.update({{"q_lora_rank", 768}, {"num_experts_per_tok", 4}});
  // The projections of biases stay operations.
  const Json biases = {{"attention_bias", true}};
  return {
      {"deepseek_v2", Latent("deepseek_v2", greedy), "fp4_e2m1/g32"},
      {"deepseek_v2_groups", Latent("deepseek_v2", by_groups), "u4/g32"},
      {"deepseek_v3", Latent("deepseek_v3", Json::object()), "default_moe"},
      {"deepseek_v3_wide", Latent("deepseek_v3", wide), "default_moe"},
      {"deepseek_v3_groups", Latent("deepseek_v3", groups), "fp4_e2m1/g32"},
      {"deepseek_v3_dense", Latent("deepseek_v3", dense), "s8/g128"},
      {"deepseek_v3_biases", Latent("deepseek_v3", biases), "fp4_e2m1/g32"},
      {"deepseek_v3_fp8_cache", Latent("deepseek_v3", wide), "fp8_e4m3/g128", DType::kF8E4M3},
      {"deepseek_v3_large", Latent("deepseek_v3", large), "default_moe"},
      {"deepseek_v3_large_of_rank", Latent("deepseek_v3", large_of_rank), "fp4_e2m1/g128"},
      {"glm4_moe_lite", Latent("glm4_moe_lite", of_rank), "default_moe"},
  };
}

/// Mixers that run elsewhere: norms of all heads at once, and states other than of delta nets.
std::vector<Case> BetweenCases() {
  const Json mamba = {{"intermediate_size", 512}, {"shared_intermediate_size", 384},
                      {"num_local_experts", 0},   {"layer_types", {"mamba", "attention", "mamba"}},
                      {"mamba_n_heads", 8},       {"mamba_n_groups", 1},
                      {"mamba_d_head", 64},       {"mamba_d_state", 64},
                      {"mamba_d_conv", 4},        {"mamba_expand", 2}};
  const Json convolution = {{"layer_types", {"conv", "full_attention", "conv"}},
                            {"conv_L_cache", 3}};
  return {
      {"olmoe", Config("olmoe", {{"num_experts", 16}}), "fp4_e2m1/g32"},
      {"minimax_m2", Config("minimax_m2", {{"num_local_experts", 16}}), "default_moe"},
      {"granitemoehybrid", Config("granitemoehybrid", mamba), "fp4_e2m1/g128"},
      {"lfm2", Config("lfm2", convolution), "u4/g32"},
  };
}

std::vector<Case> Cases() {
  const Json experts = {{"num_experts", 16}, {"norm_topk_prob", true}};
  const Json shared = {{"num_experts", 16}, {"shared_expert_intermediate_size", 96}};
  Json mixed = experts;
  mixed["mlp_only_layers"] = {1};
  return {
      {"llama", Config("llama", Json::object()), "fp4_e2m1/g128"},
      {"llama_biases", Config("llama", {{"attention_bias", true}, {"mlp_bias", true}}), "u4/g64"},
      {"llama_bytes", Config("llama", {{"head_dim", 128}}), "s8/g128"},
      {"llama_fp8", Config("llama", {{"num_key_value_heads", 8}}), "fp8_e4m3/g128"},
      {"odd_integers", Config("llama", {{"hidden_size", 192}, {"intermediate_size", 352}}),
       "s4/g32"},
      {"wide_integers", Config("llama", {{"hidden_size", 4096}, {"intermediate_size", 6144}}),
       "s4/g128"},
      {"odd_sizes", Config("llama", {{"hidden_size", 192}, {"intermediate_size", 352}}),
       "fp4_e2m1/g32"},
      {"wide", Config("llama", {{"hidden_size", 4096}, {"intermediate_size", 6144}}),
       "fp4_e2m1/g128"},
      {"mistral_window", Config("mistral", {{"sliding_window", 40}}), "fp4_e2m1/g64"},
      {"qwen2", Config("qwen2", {{"num_attention_heads", 14}}), "fp4_e2m1/g128"},
      {"qwen3", Config("qwen3", {{"head_dim", 32}}), "nf4/g64"},
      {"qwen3_moe", Config("qwen3_moe", experts), "fp4_e2m1/g32"},
      {"qwen3_moe_odd", Config("qwen3_moe", {{"num_experts", 15}}), "fp4_e2m1/g128"},
      {"qwen3_moe_zeros", Config("qwen3_moe", experts), "u4/g32"},
      {"qwen3_moe_integers", Config("qwen3_moe", experts), "u4/g128"},
      {"qwen3_moe_many", Config("qwen3_moe", {{"num_experts", 140}, {"num_experts_per_tok", 8}}),
       "fp4_e2m1/g32"},
      {"qwen3_moe_mixed", Config("qwen3_moe", mixed), "fp4_e2m1/g32/e8m0"},
      {"qwen3_moe_sparse", Config("qwen3_moe", experts), "fp4_e2m1/g32/2:4"},
      {"mixtral", Config("mixtral", {{"num_local_experts", 4}, {"num_experts_per_tok", 2}}),
       "fp4_e2m1/g128"},
      {"gpt_oss", Config("gpt_oss", {{"num_local_experts", 8}, {"sliding_window", 24}}),
       "fp4_e2m1/g32"},
      {"llama_fp8_cache", Config("llama", {{"head_dim", 128}}), "fp4_e2m1/g128", DType::kF8E4M3},
      {"gpt_oss_fp8_cache", Config("gpt_oss", {{"num_local_experts", 8}, {"sliding_window", 24}}),
       "fp4_e2m1/g32", DType::kF8E4M3},
      {"qwen3_moe_fp8_cache", Config("qwen3_moe", {{"num_experts", 16}, {"head_dim", 32}}),
       "fp4_e2m1/g32", DType::kF8E4M3},
      {"qwen3_5", Hybrid("qwen3_5_text", 64, Json::object()), "fp4_e2m1/g128"},
      {"qwen3_5_wide",
       Hybrid("qwen3_5_text", 128, {{"head_dim", 128}, {"linear_num_value_heads", 32}}), "u4/g64"},
      {"qwen3_5_moe", Hybrid("qwen3_5_moe_text", 32, shared), "fp4_e2m1/g32"},
      {"qwen3_5_moe_large",
       Hybrid("qwen3_5_moe_text", 128,
              {{"num_experts", 140},
               {"head_dim", 256},
               {"shared_expert_intermediate_size", 96},
               {"linear_num_key_heads", 16},
               {"linear_num_value_heads", 32}}),
       "default_moe"},
      {"qwen3_next", Hybrid("qwen3_next", 64, shared), "fp4_e2m1/g128"},
      {"qwen3_next_groups", Hybrid("qwen3_next", 128, shared), "default_moe"},
  };
}

class PersistentOnGpu : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!Device::Open("cuda").ok()) GTEST_SKIP() << "no CUDA device";
    const auto model = DescribeModel(GetParam().config.dump());
    ASSERT_TRUE(model.ok()) << model.status().message();
    std::vector<TestTensor> tensors;
    for (const ModelTensor& tensor : model->tensors) {
      tensors.push_back(RandomBf16(tensor.name, tensor.shape, static_cast<uint32_t>(tensors.size()),
                                   ScaleOf(tensor)));
    }
    const std::string plain = directory_ / "plain";
    std::filesystem::create_directories(plain);
    WriteFile(plain + "/config.json", GetParam().config.dump());
    WriteFile(plain + "/model.safetensors", BuildSafetensors(tensors));
    QuantizeCheckpointOptions options;
    options.recipe = GetParam().format == "default_moe"
                         ? MixedPrecisionConfig::DefaultMoe()
                         : *MixedPrecisionConfig::Uniform(GetParam().format);
    const auto report = QuantizeCheckpoint(plain, directory_ / "quantized", options);
    ASSERT_TRUE(report.ok()) << report.status().message();
    path_ = directory_ / "quantized";
    const Status opened = Model::Open(path_, Open(false)).status();
    if (opened.code() == Code::kUnsupported) GTEST_SKIP() << opened.message();
  }

  /// A device with the persistent kernel, or without; it keeps 2:4 weights sparse, or expands them.
  static Device Open(bool persistent, bool keeps_sparse = true) {
    setenv("MARLIN_CUDA_PERSISTENT", persistent ? "1" : "0", 1);
    setenv("MARLIN_CUDA_SPARSE", keeps_sparse ? "1" : "0", 1);
    auto device = Device::Open("cuda");
    unsetenv("MARLIN_CUDA_SPARSE");
    unsetenv("MARLIN_CUDA_PERSISTENT");
    return *std::move(device);
  }
  /// It is one of Hopper's own kernels.
  static bool HasPersistentKernel(const Device& device) {
    return std::ranges::any_of(device.info().kernels, [](const KernelInfo& kernel) {
      return kernel.name == "marlin_gemm_wgmma" && kernel.available;
    });
  }
  static bool IsSparse() { return GetParam().format.ends_with("2:4"); }
  /// Whether several rows run in the kernel.
  static bool TakesRows(int rows) {
    const Json& config = GetParam().config;
    const bool is_dense =
        config.value("first_k_dense_replace", 0) >= config["num_hidden_layers"].get<int>();
    const bool has_experts = config.contains("num_experts") ||
                             config.value("num_local_experts", 0) > 0 ||
                             config.contains("n_routed_experts");
    return rows <= 3 || (has_experts && !is_dense && rows <= GetParam().most_rows);
  }

  Model Load(const Device& device, bool exact = false) const {
    ModelOptions options;
    options.allow_bf16_activations = !exact;
    options.kv_cache = GetParam().kv_cache;
    auto model = Model::Open(path_, device, options);
    EXPECT_TRUE(model.ok()) << model.status().message();
    return *std::move(model);
  }
  /// The case's model in the persistent kernel, as operations, and in fp32.
  struct Models {
    explicit Models(const PersistentOnGpu& test)
        : with(Open(true)),
          without(Open(false)),
          persistent(test.Load(with)),
          chain(test.Load(without)),
          exact(test.Load(without, true)),
          runs(!GetParam().format.starts_with("nf") && !IsSparse() && HasPersistentKernel(with)) {}

    Device with;
    Device without;
    Model persistent;
    Model chain;
    Model exact;
    bool runs;  ///< The persistent kernel takes the case.
  };

  /// The logits of a prompt of `prompt` tokens in one pass, then of single tokens.
  static std::vector<float> Decode(const Model& model, int prompt, int tokens) {
    std::vector<int32_t> text(static_cast<size_t>(prompt + tokens));
    for (size_t i = 0; i < text.size(); ++i) {
      text[i] = static_cast<int32_t>((i * i * 31 + i * 17 + 5) % kVocab);
    }
    Sequence sequence = *model.NewSequence();
    std::vector<float> logits;
    const auto forward = [&](std::span<const int32_t> part) {
      logits.resize(logits.size() + kVocab);
      const MutableTensorView out(logits.data() + logits.size() - kVocab, DType::kF32, {1, kVocab});
      const SequenceInput input{&sequence, part, false};
      const Status status = model.Forward({&input, 1}, out);
      ASSERT_TRUE(status.ok()) << status.message();
    };
    const std::span<const int32_t> all(text);
    if (prompt > 0) forward(all.first(static_cast<size_t>(prompt)));
    for (size_t i = static_cast<size_t>(prompt); i < text.size(); ++i) forward(all.subspan(i, 1));
    return logits;
  }

  /// The logits of `rows` texts of different lengths, each a token in every pass, for `tokens`
  /// passes: [tokens, rows, vocab].
  static std::vector<float> DecodeTogether(const Model& model, int rows, int tokens) {
    constexpr int kLengths[] = {300, 1, 1500, 17, 40, 129, 64, 7};
    std::vector<std::vector<int32_t>> texts;
    std::vector<Sequence> sequences;
    for (int row = 0; row < rows; ++row) {
      std::vector<int32_t>& text = texts.emplace_back(static_cast<size_t>(kLengths[row] + tokens));
      for (size_t i = 0; i < text.size(); ++i) {
        text[i] = static_cast<int32_t>((i * i * 31 + i * 17 + 5 + static_cast<size_t>(row) * 11) %
                                       kVocab);
      }
      sequences.push_back(*model.NewSequence());
      std::vector<float> logits(kVocab);
      const SequenceInput input{&sequences.back(),
                                std::span(text).first(static_cast<size_t>(kLengths[row])), false};
      const MutableTensorView out(logits.data(), DType::kF32, {1, kVocab});
      const Status status = model.Forward({&input, 1}, out);
      EXPECT_TRUE(status.ok()) << status.message();
    }
    std::vector<float> logits(static_cast<size_t>(tokens * rows * kVocab));
    for (int token = 0; token < tokens; ++token) {
      std::vector<SequenceInput> inputs;
      for (int row = 0; row < rows; ++row) {
        const auto at = static_cast<size_t>(row);
        inputs.push_back(
            {&sequences[at],
             std::span(texts[at]).subspan(static_cast<size_t>(kLengths[row] + token), 1), false});
      }
      float* const first = logits.data() + int64_t{token} * rows * kVocab;
      const Status status =
          model.Forward(inputs, MutableTensorView(first, DType::kF32, {rows, kVocab}));
      EXPECT_TRUE(status.ok()) << status.message();
    }
    return logits;
  }

  /// The logits of `counts` next tokens of texts of different lengths, in every pass, for `passes`
  /// passes: [passes, all counts, vocab]. `together`: in one call, otherwise a token in each.
  static std::vector<float> DecodeGroups(const Model& model, const std::vector<int>& counts,
                                         int passes, bool together) {
    constexpr int kLengths[] = {300, 57, 1500};
    const int rows = std::accumulate(counts.begin(), counts.end(), 0);
    std::vector<std::vector<int32_t>> texts;
    std::vector<Sequence> sequences;
    for (size_t i = 0; i < counts.size(); ++i) {
      std::vector<int32_t>& text =
          texts.emplace_back(static_cast<size_t>(kLengths[i] + passes * counts[i]));
      for (size_t at = 0; at < text.size(); ++at) {
        text[at] = static_cast<int32_t>((at * at * 31 + at * 17 + 5 + i * 11) % kVocab);
      }
      sequences.push_back(*model.NewSequence());
      std::vector<float> logits(kVocab);
      Feed(model, {{&sequences[i], std::span(text).first(static_cast<size_t>(kLengths[i]))}},
           logits);
    }
    std::vector<float> logits(static_cast<size_t>(passes * rows * kVocab));
    auto next = [left = std::span(logits)](int count) mutable {
      const auto found = left.first(static_cast<size_t>(count * kVocab));
      left = left.subspan(found.size());
      return found;
    };
    for (int pass = 0; pass < passes; ++pass) {
      std::vector<SequenceInput> inputs;
      for (size_t i = 0; i < counts.size(); ++i) {
        const auto tokens = std::span(texts[i]).subspan(
            static_cast<size_t>(kLengths[i] + pass * counts[i]), static_cast<size_t>(counts[i]));
        inputs.push_back({&sequences[i], tokens, true});
        for (size_t token = 0; !together && token < tokens.size(); ++token) {
          Feed(model, {{&sequences[i], tokens.subspan(token, 1), true}}, next(1));
        }
      }
      if (together) Feed(model, inputs, next(rows));
    }
    return logits;
  }
  static void Feed(const Model& model, const std::vector<SequenceInput>& inputs,
                   std::span<float> logits) {
    const int64_t rows = std::ssize(logits) / kVocab;
    const Status status =
        model.Forward(inputs, MutableTensorView(logits.data(), DType::kF32, {rows, kVocab}));
    EXPECT_TRUE(status.ok()) << status.message();
  }

  /// The same; of a model with states, at least 28 tokens, four at a time: an expert that is
  /// selected otherwise changes all later tokens of its part, but not the quartile.
  static std::vector<float> DecodeInParts(const Model& model, int prompt, int tokens) {
    if (!GetParam().config.contains("linear_num_key_heads")) return Decode(model, prompt, tokens);
    constexpr int kPart = 4;
    std::vector<float> logits;
    for (int done = 0; done < std::max(tokens, 7 * kPart); done += kPart) {
      const std::vector<float> part = Decode(model, prompt + done, kPart);
      logits.insert(logits.end(), part.begin(), part.end());
    }
    return logits;
  }

  /// The first quartile over tokens of the relative distances of their logits: where two experts
  /// score nearly the same, either path may select the other one for some token.
  static double Distance(const std::vector<float>& a, const std::vector<float>& b) {
    EXPECT_EQ(a.size(), b.size());
    std::vector<double> distances;
    for (size_t first = 0; first < a.size(); first += kVocab) {
      double difference = 0;
      double size = 0;
      for (size_t i = first; i < first + kVocab; ++i) {
        difference += std::pow(double{a[i]} - double{b[i]}, 2);
        size += std::pow(double{b[i]}, 2);
      }
      distances.push_back(std::sqrt(difference / size));
    }
    const auto quartile = distances.begin() + static_cast<ptrdiff_t>(distances.size() / 4);
    std::ranges::nth_element(distances, quartile);
    return *quartile;
  }

  TemporaryDirectory directory_;
  std::string path_;
};

TEST_P(PersistentOnGpu, IsAsNearToFp32AsTheOperations) {
  const Models models(*this);
  const auto& [with, without, persistent, chain, exact, runs] = models;
  for (const auto& [prompt, tokens] : {std::pair(0, 70), std::pair(300, 8), std::pair(1500, 4)}) {
    SCOPED_TRACE(fmt::format("{} + {} tokens", prompt, tokens));
    const std::vector<float> wanted = DecodeInParts(exact, prompt, tokens);
    const std::vector<float> mine = DecodeInParts(persistent, prompt, tokens);
    const std::vector<float> others = DecodeInParts(chain, prompt, tokens);
    const double distance = Distance(mine, wanted);
    const double reference = Distance(others, wanted);
    EXPECT_LT(distance, 1.5 * reference + 1e-3);
    if (!runs) {
      EXPECT_EQ(mine, others) << "weights or a device without a persistent kernel";
    } else if (prompt == 0) {
      EXPECT_NE(mine, others) << "the persistent kernel did not run";
    }
    RecordProperty(fmt::format("distance_{}", prompt), fmt::format("{:.2e}", distance));
    fmt::print("{} {}+{}: {:.2e}, operations {:.2e}\n", GetParam().name, prompt, tokens, distance,
               reference);
    // Nothing depends on timing.
    EXPECT_EQ(DecodeInParts(persistent, prompt, tokens), mine);
  }
}

TEST_P(PersistentOnGpu, RowsAreAsNearToFp32AsTheOperations) {
  const Models models(*this);
  const auto& [with, without, persistent, chain, exact, runs] = models;
  for (const int rows : {2, 3, 5, 8}) {
    SCOPED_TRACE(fmt::format("{} rows", rows));
    constexpr int kTokens = 12;
    const std::vector<float> wanted = DecodeTogether(exact, rows, kTokens);
    const std::vector<float> mine = DecodeTogether(persistent, rows, kTokens);
    const std::vector<float> others = DecodeTogether(chain, rows, kTokens);
    const double distance = Distance(mine, wanted);
    const double reference = Distance(others, wanted);
    EXPECT_LT(distance, 1.5 * reference + 1e-3);
    if (runs && TakesRows(rows)) {
      EXPECT_NE(mine, others) << "the persistent kernel did not run";
    }
    fmt::print("{} {} rows: {:.2e}, operations {:.2e}\n", GetParam().name, rows, distance,
               reference);
    EXPECT_EQ(DecodeTogether(persistent, rows, kTokens), mine);
  }
}

/// Layers with latent attention leave only the first projections to operations.
TEST_P(PersistentOnGpu, RunsHaveAllOfLatentAttention) {
  const Json& config = GetParam().config;
  if (!config.contains("kv_lora_rank")) GTEST_SKIP() << "other attention";
  const Device device = Open(true);
  if (!HasPersistentKernel(device)) GTEST_SKIP() << "no persistent kernel";
  const std::string fusion = Load(device).info().fusion;
  const int layers = config["num_hidden_layers"].get<int>();
  // Embedding, head and sampling are operations, too.
  if (config.value("attention_bias", false)) {
    EXPECT_EQ(fusion, fmt::format("{} of {} operations (layer 1: biases of queries or latents)",
                                  4 * layers, 5 * layers + 3));
  } else {
    EXPECT_EQ(fusion, fmt::format("{} of {} operations", 5 * layers - 1, 5 * layers + 3));
  }
}

/// Layers whose mixer runs elsewhere leave their later half to the kernel.
TEST_P(PersistentOnGpu, RunsBeginAfterOtherMixers) {
  const Device device = Open(true);
  const std::string fusion = Load(device).info().fusion;
  const Json& config = GetParam().config;
  const auto cases = BetweenCases();
  const auto is_case = [](const Case& model) { return model.name == GetParam().name; };
  if (!HasPersistentKernel(device) || std::ranges::none_of(cases, is_case)) {
    GTEST_SKIP() << "other mixers, or no persistent kernel";
  }
  const int layers = config["num_hidden_layers"].get<int>();
  EXPECT_THAT(fusion, ::testing::StartsWith(fmt::format("{} of ", 3 * layers)));
}

/// Several next tokens of one text, or of some, as speculation verifies them.
TEST_P(PersistentOnGpu, RowsOfOneTextAreAsNearToFp32AsTheOperations) {
  const Models models(*this);
  const auto& [with, without, persistent, chain, exact, runs] = models;
  for (const std::vector<int>& counts :
       {std::vector<int>{2}, {3}, {1, 2}, {4, 1}, {3, 2, 1}, {8}}) {
    SCOPED_TRACE(fmt::format("{} tokens", fmt::join(counts, ", ")));
    // Positions on both sides of blocks of 16 keys, and of pages of 64.
    constexpr int kPasses = 12;
    const std::vector<float> wanted = DecodeGroups(exact, counts, kPasses, false);
    const std::vector<float> mine = DecodeGroups(persistent, counts, kPasses, true);
    const std::vector<float> others = DecodeGroups(chain, counts, kPasses, true);
    const std::vector<float> singly = DecodeGroups(persistent, counts, kPasses, false);
    const double reference = Distance(others, wanted);
    const double distance = Distance(mine, wanted);
    EXPECT_LT(distance, 1.5 * reference + 1e-3);
    EXPECT_LT(Distance(mine, singly), 3 * reference + 2e-3);
    if (runs && TakesRows(std::accumulate(counts.begin(), counts.end(), 0))) {
      EXPECT_NE(mine, others) << "the persistent kernel did not run";
    }
    fmt::print("{} {} tokens: {:.2e}, operations {:.2e}\n", GetParam().name,
               fmt::join(counts, ", "), distance, reference);
    EXPECT_EQ(DecodeGroups(persistent, counts, kPasses, true), mine);
  }
}

/// A model whose attention and experts are 2:4.
TEST_P(PersistentOnGpu, SparseWeightsAreThoseThatAreExpanded) {
  if (!IsSparse()) GTEST_SKIP() << "dense weights";
  const Model kept = Load(Open(true, true), true);
  const Model expanded = Load(Open(true, false), true);
  EXPECT_LT(kept.info().bytes, expanded.info().bytes);
  for (const auto& [prompt, tokens] : {std::pair(0, 20), std::pair(300, 8)}) {
    EXPECT_EQ(Decode(kept, prompt, tokens), Decode(expanded, prompt, tokens));
  }
}

TEST_P(PersistentOnGpu, SequencesOfTwoThreadsDoNotMeet) {
  const Device device = Open(true);
  const Model model = Load(device);
  const std::vector<float> wanted = Decode(model, 10, 40);
  std::vector<std::vector<float>> found(4);
  std::vector<std::thread> threads;
  threads.reserve(found.size());
  for (std::vector<float>& logits : found) {
    threads.emplace_back([&] { logits = Decode(model, 10, 40); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<float>& logits : found) EXPECT_EQ(logits, wanted);
}

class StepsOnGpu : public PersistentOnGpu {};

/// Over ten thousand steps.
TEST_P(StepsOnGpu, HaveTheSameBits) {
  constexpr int kTokens = 3400;
  const Model model = Load(Open(true));
  const std::vector<float> first = Decode(model, 0, kTokens);
  for (int turn = 1; turn < 3; ++turn) EXPECT_EQ(Decode(model, 0, kTokens), first);
}

INSTANTIATE_TEST_SUITE_P(Models, PersistentOnGpu, ::testing::ValuesIn(Cases()),
                         [](const auto& param) { return param.param.name; });
INSTANTIATE_TEST_SUITE_P(Latent, PersistentOnGpu, ::testing::ValuesIn(LatentCases()),
                         [](const auto& param) { return param.param.name; });
INSTANTIATE_TEST_SUITE_P(Between, PersistentOnGpu, ::testing::ValuesIn(BetweenCases()),
                         [](const auto& param) { return param.param.name; });
INSTANTIATE_TEST_SUITE_P(Shared, PersistentOnGpu, ::testing::ValuesIn(SharedCases()),
                         [](const auto& param) { return param.param.name; });

/// Every form of one row; the first one also with integers and with experts.
std::vector<Case> FormsOfOneRow() {
  std::vector<Case> forms;
  for (const std::vector<Case>& cases : {Cases(), SharedCases(), LatentCases()}) {
    std::ranges::copy_if(cases, std::back_inserter(forms), [](const Case& model) {
      const std::vector<std::string> names = {"llama",   "llama_biases", "qwen3_moe",
                                              "qwen3_5", "qwen2_moe",    "deepseek_v3_wide"};
      return std::ranges::find(names, model.name) != names.end();
    });
  }
  EXPECT_EQ(forms.size(), 6U);
  return forms;
}
INSTANTIATE_TEST_SUITE_P(Forms, StepsOnGpu, ::testing::ValuesIn(FormsOfOneRow()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace marlin::persistent_gpu_test
