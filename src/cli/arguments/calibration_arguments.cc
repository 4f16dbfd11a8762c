#include "cli/arguments/calibration_arguments.h"

#include <fmt/core.h>

#include <cctype>

#include "base/errors.h"
#include "base/macros.h"
#include "base/printable.h"
#include "cli/arguments/model_arguments.h"

namespace marlin::cli {
namespace {

/// Begins with a capital letter.
std::string Sentence(std::string text) {
  text[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(text[0])));
  return text;
}

}  // namespace

void CalibrationArguments::Declare(ArgumentList& arguments, const std::string& use,
                                   const std::string& tokens) {
  arguments.Option("--calibration", &calibration_, "FILE",
                   Sentence(use + "a text; default: sampled from the model itself").c_str());
  arguments.Option("--calibration-ids", &ids_, "FILE",
                   Sentence(use + "token ids instead, separated by spaces or commas").c_str());
  special_.Declare(arguments);
  arguments.Option("--calibration-tokens", &tokens_, {.least = 2}, "N",
                   Sentence(use + "tokens to use; " + tokens).c_str());
  arguments.Option("--seed", &seed_, WholeRange(), "S",
                   Sentence(use + "of the sampled text; default 0").c_str());
}

Status CalibrationArguments::Check(const Console& console) const {
  if (calibration_ && ids_) {
    return Invalid("--calibration and --calibration-ids exclude each other");
  }
  if (seed_ && (calibration_ || ids_)) {
    return Invalid("--seed: the text is given, and not sampled");
  }
  return calibration_ ? CheckHasCodec(console, "--calibration", "--calibration-ids") : Status();
}

Result<CalibrationOptions> CalibrationArguments::Read(const Console& console,
                                                      const std::string& model) const {
  CalibrationOptions calibration;
  calibration.tokens = tokens_.value_or(0);
  calibration.seed = static_cast<uint64_t>(seed_.value_or(0));
  const std::optional<std::string>& file = calibration_ ? calibration_ : ids_;
  if (ids_) {
    MARLIN_ASSIGN_OR_RETURN(calibration.text, ReadTokens(*ids_));
  } else if (calibration_) {
    MARLIN_ASSIGN_OR_RETURN(const std::string text, ReadText(*calibration_));
    MARLIN_ASSIGN_OR_RETURN(const auto codec, OpenCodec(console, "--calibration", model));
    MARLIN_ASSIGN_OR_RETURN(calibration.text, codec->Encode(text, special_.added()));
    if (text.empty()) calibration.text.clear();
  }
  if (file && calibration.text.empty()) {
    return Status(Code::kMalformedFile, fmt::format("{}: has no tokens", Printable(*file)));
  }
  return calibration;
}

std::string CalibrationArguments::TextName() const {
  if (calibration_) return *calibration_;
  return ids_ ? *ids_ : fmt::format("sampled from the model, seed {}", seed_.value_or(0));
}

}  // namespace marlin::cli
