// Options that choose formats for a number of bits per weight.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/arguments/arguments.h"
#include "marlin/checkpoint.h"
#include "marlin/recipe.h"
#include "marlin/sensitivity.h"

namespace marlin::cli {

/// Parses "nf3/g64,nf4/g64". Errors: kInvalidArgument naming the option and the part.
Result<std::vector<FormatChoice>> ParseFormatList(const char* option, const std::string& text);

/// --target-bpw, --sensitivity, --formats.
class TargetArguments {
 public:
  void Declare(ArgumentList& arguments);
  bool given() const { return target_.has_value(); }
  /// 0 unless given.
  double target() const { return target_.value_or(0); }
  /// True if the sensitivity has to be measured.
  bool measures() const { return target_ && !file_; }
  /// Errors: kInvalidArgument for options without --target-bpw.
  Status Check() const;
  /// --formats; empty without it.
  Result<std::vector<FormatChoice>> Formats() const;
  /// The sensitivity that --sensitivity names. Errors: as Sensitivity::FromFile.
  Result<Sensitivity> Read() const { return Sensitivity::FromFile(*file_); }
  /// Errors: as AssignFormats.
  Result<FormatAssignment> Assign(const Checkpoint& source, const Sensitivity& sensitivity) const;

 private:
  std::optional<double> target_;
  std::optional<std::string> file_;
  std::optional<std::string> formats_;
};

}  // namespace marlin::cli
