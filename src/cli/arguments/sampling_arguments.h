// How the tokens of a text are chosen.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "cli/arguments/arguments.h"
#include "marlin/sampling.h"

namespace marlin::cli {

/// --temperature, --top-k, --top-p, --min-p, the penalties and --seed.
class SamplingArguments {
 public:
  void Declare(ArgumentList& arguments);
  /// `model`: what generation_config.json asks for, where no option says otherwise.
  SamplingOptions Options(const SamplingOptions& model) const;
  /// The options that are given, by the names of OpenAI's API.
  nlohmann::ordered_json Given() const;

 private:
  std::optional<double> temperature_;
  std::optional<int64_t> top_k_;
  std::optional<double> top_p_;
  std::optional<double> min_p_;
  std::optional<double> repetition_penalty_;
  std::optional<double> presence_penalty_;
  std::optional<double> frequency_penalty_;
  std::optional<int64_t> seed_;
};

}  // namespace marlin::cli
