// Options of commands that guess tokens and verify several at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "cli/arguments/arguments.h"
#include "cli/arguments/model_arguments.h"
#include "marlin/generate.h"
#include "marlin/model.h"
#include "marlin/speculation.h"
#include "marlin/status.h"
#include "text/text_codec.h"

namespace marlin::cli {

/// --speculate, --speculate-always and --draft.
class DraftArguments {
 public:
  void Declare(ArgumentList& arguments);
  /// Errors: kInvalidArgument for an option that needs --speculate.
  Status Check() const;

  bool given() const { return tokens_.value_or(0) > 0; }
  DraftSource source() const;
  /// Opens the model of --draft, if it is one. `codec`: the tokenizer of `model`, or null. Errors:
  /// of `open`; as CheckDraftModel and TextCodec::CheckSameTokens.
  using Open = std::function<Result<Model>(const std::string& path)>;
  Result<SpeculationOptions> Options(const Model& model, TextCodec* codec, const Open& open) const;
  /// "mtp", "lookup" or the model's path, as --draft has it.
  std::string name() const;

 private:
  std::optional<int64_t> tokens_;
  bool always_ = false;
  std::optional<std::string> draft_;
};

/// "accepted 40 of 52 guesses, 3.1 per pass", or nothing without guesses.
std::string DescribeDrafts(const DraftCounts& drafts);

}  // namespace marlin::cli
