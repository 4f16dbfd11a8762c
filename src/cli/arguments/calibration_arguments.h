// The text of a calibration, for commands that measure a model's layers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cli/arguments/arguments.h"
#include "cli/arguments/model_arguments.h"
#include "cli/console.h"
#include "marlin/calibrate.h"

namespace marlin::cli {

/// --calibration, --calibration-ids, --no-special-tokens, --calibration-tokens, --seed.
class CalibrationArguments {
 public:
  /// `use` and `tokens` begin the help: "gptq: ", "default 16384 or more".
  void Declare(ArgumentList& arguments, const std::string& use, const std::string& tokens);
  bool given() const { return calibration_ || ids_ || tokens_ || seed_; }
  /// Errors: kInvalidArgument for options that exclude each other, as CheckHasCodec.
  Status Check(const Console& console) const;
  /// Reads the text for the model in a directory. Errors: kIo, kMalformedFile for a file without
  /// tokens, as ReadTokens and the tokenizer.
  Result<CalibrationOptions> Read(const Console& console, const std::string& model) const;
  /// The text's file, or how the model writes it.
  std::string TextName() const;
  const SpecialTokensArgument& special() const { return special_; }

 private:
  std::optional<std::string> calibration_;
  std::optional<std::string> ids_;
  SpecialTokensArgument special_;
  std::optional<int64_t> tokens_;
  std::optional<int64_t> seed_;
};

}  // namespace marlin::cli
