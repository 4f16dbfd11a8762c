// The C interface of models: generation and perplexity equal the C++ interface's, and wrong
// arguments are named.
#include <gtest/gtest.h>

#include <cstddef>
#include <fstream>
#include <string>
#include <vector>

#include "../../source_directory.h"
#include "marlin/evaluate.h"
#include "marlin/generate.h"
#include "marlin/marlin_c_model.h"

namespace {

std::string SampleModel() { return marlin::SourceDirectory() + "/examples/tiny-qwen3-moe"; }

/// The first tokens of the validation text.
std::vector<int32_t> TextTokens(size_t count) {
  std::ifstream file(SampleModel() + "/validation_tokens.txt");
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) file >> token;
  EXPECT_TRUE(file.good());
  return tokens;
}

/// Keeps the tokens of a callback, which ends generation after `most`.
struct Kept {
  std::vector<int32_t> tokens;
  size_t most = SIZE_MAX;
};
int32_t Keep(void* context, int32_t token) {
  Kept& kept = *static_cast<Kept*>(context);
  kept.tokens.push_back(token);
  return kept.tokens.size() < kept.most ? 1 : 0;
}

class ModelC : public ::testing::Test {
 protected:
  ModelC() {
    EXPECT_EQ(marlin_device_open("cpu", 1, &device_), MARLIN_OK);
    EXPECT_EQ(marlin_model_open(SampleModel().c_str(), device_, nullptr, &model_), MARLIN_OK)
        << marlin_last_error();
    options_.max_tokens = 6;
  }
  ~ModelC() override {
    marlin_device_destroy(device_);
    marlin_model_destroy(model_);
  }
  marlin_code Generate(marlin_generated* generated = nullptr) {
    kept_.tokens.clear();
    return marlin_model_generate(model_, prompt_.data(), static_cast<int64_t>(prompt_.size()),
                                 &options_, &Keep, &kept_, generated);
  }
  void ExpectInvalid(marlin_code code, const std::string& message) {
    EXPECT_EQ(code, MARLIN_INVALID_ARGUMENT);
    EXPECT_EQ(marlin_last_error(), message);
  }

  marlin_device* device_ = nullptr;
  marlin_model* model_ = nullptr;
  std::vector<int32_t> prompt_ = TextTokens(7);
  marlin_generate_options options_ = MARLIN_GENERATE_OPTIONS_INIT;
  Kept kept_;
};

TEST_F(ModelC, GeneratesAsTheCppInterfaceDoes) {
  options_.temperature = 0.8F;
  options_.top_k = 20;
  options_.top_p = 0.9F;
  options_.min_p = 0.01F;
  options_.repetition_penalty = 1.2F;
  options_.presence_penalty = 0.1F;
  options_.frequency_penalty = 0.2F;
  options_.seed = 5;
  marlin_generated generated = MARLIN_GENERATED_INIT;
  ASSERT_EQ(Generate(&generated), MARLIN_OK) << marlin_last_error();

  const auto device = marlin::Device::Open("cpu", {.threads = 1});
  const auto model = marlin::Model::Open(SampleModel(), *device);
  ASSERT_TRUE(model.ok());
  const auto expected = marlin::Generate(*model, prompt_,
                                         {.max_tokens = 6,
                                          .sampling = {.temperature = 0.8F,
                                                       .top_k = 20,
                                                       .top_p = 0.9F,
                                                       .seed = 5,
                                                       .min_p = 0.01F,
                                                       .repetition_penalty = 1.2F,
                                                       .presence_penalty = 0.1F,
                                                       .frequency_penalty = 0.2F}});
  ASSERT_TRUE(expected.ok());
  EXPECT_EQ(kept_.tokens, expected->token_ids);
  EXPECT_EQ(generated.tokens, 6);
  EXPECT_EQ(generated.stop_reason, MARLIN_STOP_MAX_TOKENS);
  EXPECT_GT(generated.prefill_seconds, 0);
  EXPECT_GT(generated.decode_seconds, 0);
}

TEST_F(ModelC, GuessesChangeNoText) {
  marlin_generated generated = MARLIN_GENERATED_INIT;
  ASSERT_EQ(Generate(&generated), MARLIN_OK);
  const std::vector<int32_t> all = kept_.tokens;
  EXPECT_EQ(generated.draft_tokens, 0);
  marlin_model* draft = nullptr;
  ASSERT_EQ(marlin_model_open(SampleModel().c_str(), device_, nullptr, &draft), MARLIN_OK);
  options_.speculate = 3;
  options_.speculate_always = 1;
  options_.draft_model = draft;
  ASSERT_EQ(Generate(&generated), MARLIN_OK) << marlin_last_error();
  EXPECT_EQ(kept_.tokens, all);
  EXPECT_EQ(generated.draft_passes, 1);
  EXPECT_EQ(generated.draft_tokens, 3);
  EXPECT_EQ(generated.accepted_tokens, 3);
  options_.draft_layer = 1;
  ExpectInvalid(Generate(), "draft_model: excludes draft_layer");
  options_.draft_model = nullptr;
  ExpectInvalid(Generate(),
                "speculation: draft: the model was opened without the option to load one");
  marlin_model_destroy(draft);
}

TEST_F(ModelC, GenerationEndsWhereItIsTold) {
  ASSERT_EQ(Generate(), MARLIN_OK);
  const std::vector<int32_t> all = kept_.tokens;
  ASSERT_EQ(all.size(), 6U);
  marlin_generated generated = MARLIN_GENERATED_INIT;
  kept_.most = 2;
  ASSERT_EQ(Generate(&generated), MARLIN_OK);
  EXPECT_EQ(kept_.tokens, std::vector<int32_t>(all.begin(), all.begin() + 2));
  EXPECT_EQ(generated.stop_reason, MARLIN_STOP_CALLBACK);

  kept_.most = SIZE_MAX;
  options_.stop_token_ids = &all[3];
  options_.stop_token_count = 1;
  ASSERT_EQ(Generate(&generated), MARLIN_OK);
  EXPECT_EQ(kept_.tokens, std::vector<int32_t>(all.begin(), all.begin() + 3));
  EXPECT_EQ(generated.tokens, 3);
  EXPECT_EQ(generated.stop_reason, MARLIN_STOP_TOKEN);
  options_.ignore_stop_tokens = 1;
  ASSERT_EQ(Generate(&generated), MARLIN_OK);
  EXPECT_EQ(kept_.tokens, all);
}

TEST_F(ModelC, PerplexityIsThatOfTheCppInterface) {
  const std::vector<int32_t> text = TextTokens(100);
  marlin_perplexity_options options = MARLIN_PERPLEXITY_OPTIONS_INIT;
  options.window = 32;
  options.stride = 16;
  options.max_windows = 3;
  marlin_perplexity made = MARLIN_PERPLEXITY_INIT;
  ASSERT_EQ(marlin_model_perplexity(model_, text.data(), 100, &options, &made), MARLIN_OK)
      << marlin_last_error();
  const auto device = marlin::Device::Open("cpu", {.threads = 1});
  const auto model = marlin::Model::Open(SampleModel(), *device);
  ASSERT_TRUE(model.ok());
  const auto expected =
      marlin::Perplexity(*model, text, {.window = 32, .stride = 16, .max_windows = 3});
  ASSERT_TRUE(expected.ok());
  EXPECT_EQ(made.perplexity, expected->perplexity);
  EXPECT_EQ(made.nll, expected->nll);
  EXPECT_EQ(made.standard_error, expected->standard_error);
  EXPECT_EQ(made.tokens, expected->tokens);
  EXPECT_EQ(made.windows, 3);
}

TEST_F(ModelC, DescribesTheModel) {
  marlin_model_info info = MARLIN_MODEL_INFO_INIT;
  ASSERT_EQ(marlin_model_get_info(model_, &info), MARLIN_OK);
  EXPECT_EQ(info.layers, 4);
  EXPECT_EQ(info.hidden_size, 128);
  EXPECT_EQ(info.vocab_size, 1024);
  EXPECT_EQ(info.max_positions, 1024);
  EXPECT_EQ(info.bits_per_weight, 16);
  EXPECT_EQ(info.embedding_bits_per_weight, 16);
  EXPECT_EQ(info.head_bits_per_weight, 16);
  EXPECT_GT(info.parameters, 2000000);
  EXPECT_GT(info.bytes, info.parameters);
  EXPECT_STREQ(marlin_model_type(model_), "qwen3_moe");
  EXPECT_STREQ(marlin_model_device_name(model_), "cpu");
  options_.temperature = 3;
  ASSERT_EQ(marlin_model_get_generate_options(model_, &options_), MARLIN_OK);
  EXPECT_EQ(options_.temperature, 0);
  EXPECT_EQ(options_.max_tokens, 128);
  // An older caller's struct is written within its size.
  info.hidden_size = -1;
  info.size = offsetof(marlin_model_info, hidden_size);
  ASSERT_EQ(marlin_model_get_info(model_, &info), MARLIN_OK);
  EXPECT_EQ(info.hidden_size, -1);
  EXPECT_EQ(info.size, offsetof(marlin_model_info, hidden_size));
}

TEST_F(ModelC, OptionsReachTheModel) {
  marlin_model_options options = MARLIN_MODEL_OPTIONS_INIT;
  marlin_model* other = nullptr;
  const auto open = [&] {
    return marlin_model_open(SampleModel().c_str(), device_, &options, &other);
  };
  options.kv_cache = "fp9";
  EXPECT_EQ(open(), MARLIN_INVALID_ARGUMENT);
  EXPECT_EQ(other, nullptr);
  options.kv_cache = "fp8_e4m3";
  options.keep_activations = options.batch_invariant = options.allow_extra_tensors = 1;
  ASSERT_EQ(open(), MARLIN_OK) << marlin_last_error();
  marlin_model_destroy(other);
  options.prepared = "/absent/file";
  EXPECT_EQ(open(), MARLIN_IO);
  EXPECT_NE(std::string(marlin_last_error()).find("/absent/file"), std::string::npos);
  EXPECT_EQ(marlin_model_open("/absent", device_, nullptr, &other), MARLIN_IO);
}

TEST_F(ModelC, WrongArgumentsAreNamed) {
  marlin_model* other = nullptr;
  marlin_perplexity made = MARLIN_PERPLEXITY_INIT;
  ExpectInvalid(marlin_model_open(nullptr, device_, nullptr, &other), "path: NULL");
  ExpectInvalid(marlin_model_open("a", nullptr, nullptr, &other), "device: NULL");
  ExpectInvalid(marlin_model_open("a", device_, nullptr, nullptr), "model: NULL");
  ExpectInvalid(marlin_model_get_info(model_, nullptr), "info: NULL");
  ExpectInvalid(marlin_model_get_generate_options(nullptr, &options_), "model: NULL");
  ExpectInvalid(marlin_model_generate(model_, nullptr, 2, nullptr, nullptr, nullptr, nullptr),
                "prompt: NULL");
  ExpectInvalid(marlin_model_generate(model_, nullptr, -1, nullptr, nullptr, nullptr, nullptr),
                "prompt_count: expected 0 or more, got -1");
  ExpectInvalid(marlin_model_perplexity(model_, nullptr, 9, nullptr, &made), "tokens: NULL");
  ExpectInvalid(marlin_model_perplexity(model_, prompt_.data(), 7, nullptr, nullptr),
                "perplexity: NULL");
  EXPECT_EQ(marlin_model_perplexity(model_, prompt_.data(), 1, nullptr, &made),
            MARLIN_INVALID_ARGUMENT);
  EXPECT_EQ(marlin_model_generate(model_, nullptr, 0, nullptr, nullptr, nullptr, nullptr),
            MARLIN_INVALID_ARGUMENT);
  options_.stop_token_count = 1;
  ExpectInvalid(Generate(), "stop_token_ids: NULL");
  options_.stop_token_count = 0;
  options_.size = 1;
  ExpectInvalid(Generate(), "options: size 1 is not the size of an initialized struct");
  options_.size = sizeof(options_);
  prompt_[0] = 1024;
  EXPECT_EQ(Generate(), MARLIN_INVALID_ARGUMENT);
  EXPECT_TRUE(kept_.tokens.empty());
  EXPECT_STREQ(marlin_model_type(nullptr), "");
  EXPECT_STREQ(marlin_model_device_name(nullptr), "");
}

}  // namespace
