#include "model/generation_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace marlin::generation_config_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Result<GenerationDefaults> Read(const std::string& config, const GenerationFiles& files) {
  Result<ModelConfig> parsed = ModelConfig::Parse(config);
  return parsed.ok() ? ReadGenerationDefaults(*parsed, files) : parsed.status();
}

TEST(GenerationDefaults, EndTokensOfAllFiles) {
  GenerationFiles files;
  EXPECT_THAT(Read("{}", files)->eos_token_ids, IsEmpty());
  EXPECT_THAT(Read(R"({"eos_token_id": 1})", files)->eos_token_ids, ElementsAre(1));
  files.generation_config = R"({"eos_token_id": [5, 1, 5]})";
  EXPECT_THAT(Read(R"({"eos_token_id": [2, 1]})", files)->eos_token_ids, ElementsAre(5, 1, 2));
  files.tokenizer = R"({"model": {"vocab": {"<end>": 3}}, "added_tokens": [
      {"id": 8, "content": "<pad>"}, {"id": 9, "content": "<end>"}]})";
  for (const char* const token : {R"("<end>")", R"({"content": "<end>", "special": true})"}) {
    files.tokenizer_config = std::string(R"({"eos_token": )") + token + "}";
    EXPECT_THAT(Read(R"({"eos_token_id": 2})", files)->eos_token_ids, ElementsAre(5, 1, 2, 9));
  }
  for (const char* const other : {R"({"eos_token": null})", R"({"eos_token": "<absent>"})", "{}"}) {
    files.tokenizer_config = other;
    EXPECT_THAT(Read("{}", files)->eos_token_ids, ElementsAre(5, 1)) << other;
  }
  // Those who encode texts say what is wrong with it.
  files.tokenizer_config = R"({"eos_token": "<end>"})";
  for (const char* const broken : {"", "{", "[]", R"({"added_tokens": 7})",
                                   R"({"added_tokens": [7, {"content": "<end>", "id": "x"}]})"}) {
    files.tokenizer = broken;
    EXPECT_THAT(Read("{}", files)->eos_token_ids, ElementsAre(5, 1)) << broken;
  }
}

TEST(GenerationDefaults, Sampling) {
  const auto read = [](const char* config) {
    GenerationFiles files;
    files.generation_config = config;
    return *Read("{}", files);
  };
  // Greedy: the other values are for those who ask for a temperature.
  const SamplingOptions greedy = read(R"({"temperature": 0.6, "top_p": 0.9})").sampling;
  EXPECT_EQ(greedy.temperature, 0.0F);
  EXPECT_EQ(greedy.top_p, 0.9F);
  EXPECT_EQ(greedy.top_k, 0);
  const SamplingOptions usual = read(R"({"do_sample": true})").sampling;
  EXPECT_EQ(usual.temperature, 1.0F);
  EXPECT_EQ(usual.top_k, 50);
  EXPECT_EQ(usual.top_p, 1.0F);
  const SamplingOptions all = read(R"({"do_sample": true, "temperature": 0.7, "top_k": 0,
      "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.1})")
                                  .sampling;
  EXPECT_EQ(all.temperature, 0.7F);
  EXPECT_EQ(all.top_k, 0);
  EXPECT_EQ(all.top_p, 0.8F);
  EXPECT_EQ(all.min_p, 0.05F);
  EXPECT_EQ(all.repetition_penalty, 1.1F);
}

TEST(GenerationDefaults, WhatIsNotAppliedIsListed) {
  GenerationFiles files;
  files.generation_config = R"({"no_repeat_ngram_size": 3, "num_beams": 1, "typical_p": 1.0,
      "suppress_tokens": [1], "bad_words_ids": null, "max_length": 20})";
  EXPECT_THAT(Read("{}", files)->ignored, ElementsAre("no_repeat_ngram_size", "suppress_tokens"));
}

TEST(GenerationDefaults, BrokenFilesAreNamed) {
  for (const auto& [generation, tokenizer, says] :
       {std::tuple{R"({"temperature": "hot"})", "", "generation_config.json: temperature"},
        std::tuple{R"({"top_p": 0})", "", "generation_config.json: top_p"},
        std::tuple{R"({"eos_token_id": "x"})", "", "generation_config.json: eos_token_id"},
        std::tuple{"", "[", "tokenizer_config.json: "}}) {
    GenerationFiles files;
    files.generation_config = generation;
    files.tokenizer_config = tokenizer;
    const auto read = Read("{}", files);
    EXPECT_EQ(read.status().code(), Code::kMalformedFile);
    EXPECT_THAT(read.status().message(), ::testing::HasSubstr(says));
  }
}

}  // namespace
}  // namespace marlin::generation_config_test
