#include "model/generation_config.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/json.h"
#include "base/macros.h"
#include "ops/decoder/sampling.h"

namespace marlin {
namespace {

constexpr const char* kTokenizerConfig = "tokenizer_config.json";

void AddEnd(int64_t id, std::vector<int32_t>* ends) {
  const auto token = static_cast<int32_t>(id);
  if (std::find(ends->begin(), ends->end(), token) == ends->end()) ends->push_back(token);
}

/// Adds one id or a list of ids.
void AddEnds(ModelConfig& config, std::vector<int32_t>* ends) {
  constexpr const char* kKey = "eos_token_id";
  if (!config.Has(kKey)) return;
  if (!config.IsList(kKey)) return AddEnd(config.CountOr(kKey, INT32_MAX, 0), ends);
  for (const int64_t id : config.IntegersOrEmpty(kKey)) {
    if (id >= 0 && id <= INT32_MAX) AddEnd(id, ends);
  }
}

/// The text of a token, which is a string or an object with its "content".
std::string TokenText(const Json& token) {
  if (token.is_string()) return token.get<std::string>();
  const bool whole = token.is_object() && token.contains("content") && token["content"].is_string();
  return whole ? token["content"].get<std::string>() : std::string();
}

/// Adds the end of text that tokenizer_config.json names, by its number in tokenizer.json. A broken
/// tokenizer.json is an error of those who encode texts.
Status AddTokenizerEnd(const GenerationFiles& files, std::vector<int32_t>* ends) {
  if (files.tokenizer_config.empty()) return {};
  MARLIN_ASSIGN_OR_RETURN(
      const Json config,
      ParseJsonObject(files.tokenizer_config, kTokenizerConfig, kTokenizerConfigJson));
  const std::string end = config.contains("eos_token") ? TokenText(config["eos_token"]) : "";
  if (end.empty()) return {};
  const Result<Json> tokenizer =
      ParseJsonObject(files.tokenizer, "tokenizer.json", kAddedTokensJson);
  if (!tokenizer.ok() || !tokenizer->contains("added_tokens")) return {};
  for (const Json& token : (*tokenizer)["added_tokens"]) {
    if (TokenText(token) != end || !token.contains("id")) continue;
    const Json& id = token["id"];
    if (id.is_number_unsigned() && id.get<uint64_t>() <= INT32_MAX) {
      AddEnd(id.get<int64_t>(), ends);
    }
  }
  return {};
}

void ReadSampling(ModelConfig& config, SamplingOptions* sampling) {
  // What transformers takes for keys that are missing.
  constexpr int64_t kUsualTopK = 50;
  constexpr double kLeastTopP = 1e-6;
  const bool samples = config.Bool("do_sample", false);
  const double temperature = config.RealOr("temperature", 0, 1e6, 1);
  if (samples) sampling->temperature = static_cast<float>(temperature);
  sampling->top_k = config.CountOr("top_k", INT32_MAX, samples ? kUsualTopK : 0);
  sampling->top_p = static_cast<float>(config.RealOr("top_p", kLeastTopP, 1, 1));
  sampling->min_p = static_cast<float>(config.RealOr("min_p", 0, 1, 0));
  sampling->repetition_penalty = static_cast<float>(
      config.RealOr("repetition_penalty", kLeastRepetitionPenalty, kMostRepetitionPenalty, 1));
}

/// Keys of other ways to choose tokens, and the number with which they change nothing.
std::vector<std::string> ReadIgnored(ModelConfig& config) {
  struct Key {
    const char* name;
    double neutral;
  };
  constexpr Key kKeys[] = {
      {"bad_words_ids", 0},
      {"begin_suppress_tokens", 0},
      {"diversity_penalty", 0},
      {"encoder_repetition_penalty", 1},
      {"epsilon_cutoff", 0},
      {"eta_cutoff", 0},
      {"forced_bos_token_id", -1},
      {"forced_eos_token_id", -1},
      {"guidance_scale", 1},
      {"min_length", 0},
      {"min_new_tokens", 0},
      {"no_repeat_ngram_size", 0},
      {"num_beams", 1},
      {"penalty_alpha", 0},
      {"sequence_bias", 0},
      {"suppress_tokens", 0},
      {"typical_p", 1},
      {"exponential_decay_length_penalty", 0},
  };
  std::vector<std::string> ignored;
  for (const Key& key : kKeys) {
    if (!config.Has(key.name)) continue;
    const bool changes = config.IsList(key.name) || config.IsObject(key.name) ||
                         config.RealOr(key.name, -1e300, 1e300, key.neutral) != key.neutral;
    if (changes) ignored.emplace_back(key.name);
  }
  return ignored;
}

}  // namespace

Result<GenerationDefaults> ReadGenerationDefaults(ModelConfig& config,
                                                  const GenerationFiles& files) {
  GenerationDefaults defaults;
  if (!files.generation_config.empty()) {
    MARLIN_ASSIGN_OR_RETURN(
        ModelConfig generation,
        ModelConfig::Parse(files.generation_config, "generation_config.json", kGenerationJson));
    AddEnds(generation, &defaults.eos_token_ids);
    ReadSampling(generation, &defaults.sampling);
    defaults.ignored = ReadIgnored(generation);
    MARLIN_RETURN_IF_ERROR(generation.status());
  }
  AddEnds(config, &defaults.eos_token_ids);
  MARLIN_RETURN_IF_ERROR(AddTokenizerEnd(files, &defaults.eos_token_ids));
  return defaults;
}

}  // namespace marlin
