#include "cli/arguments/sampling_arguments.h"

#include <nlohmann/json.hpp>

#include "ops/decoder/sampling.h"

namespace marlin::cli {

void SamplingArguments::Declare(ArgumentList& arguments) {
  arguments.Option("--temperature", &temperature_, {.most = 1e6}, "T",
                   "0: the most likely token; default: generation_config.json's, otherwise 0");
  arguments.Option("--top-k", &top_k_, WholeRange(), "K",
                   "Sample from the K most likely tokens; 0: all");
  arguments.Option("--top-p", &top_p_, {.most = 1, .without_least = true}, "P",
                   "Sample from the most likely tokens whose probabilities add up to P");
  arguments.Option("--min-p", &min_p_, {.most = 1}, "P",
                   "Drop tokens less likely than P times the most likely one");
  arguments.Option("--repetition-penalty", &repetition_penalty_,
                   {kLeastRepetitionPenalty, kMostRepetitionPenalty}, "F",
                   "Divide positive logits of tokens so far, the prompt's too, by F; multiply "
                   "others; default 1");
  arguments.Option("--presence-penalty", &presence_penalty_, {-kMostPenalty, kMostPenalty}, "X",
                   "Subtract X from the logits of generated tokens; default 0");
  arguments.Option("--frequency-penalty", &frequency_penalty_, {-kMostPenalty, kMostPenalty}, "X",
                   "Subtract X once per occurrence in the generated text; default 0");
  arguments.Option("--seed", &seed_, WholeRange(), "S", "Same seed, same text; default 0");
}

SamplingOptions SamplingArguments::Options(const SamplingOptions& model) const {
  SamplingOptions options = model;
  const auto take = [](const std::optional<double>& given, float* value) {
    if (given) *value = static_cast<float>(*given);
  };
  take(temperature_, &options.temperature);
  options.top_k = top_k_.value_or(options.top_k);
  take(top_p_, &options.top_p);
  take(min_p_, &options.min_p);
  take(repetition_penalty_, &options.repetition_penalty);
  options.presence_penalty = static_cast<float>(presence_penalty_.value_or(0));
  options.frequency_penalty = static_cast<float>(frequency_penalty_.value_or(0));
  options.seed = static_cast<uint64_t>(seed_.value_or(0));
  return options;
}

nlohmann::ordered_json SamplingArguments::Given() const {
  nlohmann::ordered_json given = nlohmann::ordered_json::object();
  const auto add = [&](const char* name, const auto& value) {
    if (value) given[name] = *value;
  };
  add("temperature", temperature_);
  add("top_k", top_k_);
  add("top_p", top_p_);
  add("min_p", min_p_);
  add("repetition_penalty", repetition_penalty_);
  add("presence_penalty", presence_penalty_);
  add("frequency_penalty", frequency_penalty_);
  add("seed", seed_);
  return given;
}

}  // namespace marlin::cli
