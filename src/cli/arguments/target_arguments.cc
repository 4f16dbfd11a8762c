#include "cli/arguments/target_arguments.h"

#include <fmt/core.h>

#include <string_view>

#include "base/errors.h"
#include "base/macros.h"

namespace marlin::cli {

Result<std::vector<FormatChoice>> ParseFormatList(const char* option, const std::string& text) {
  std::vector<FormatChoice> formats;
  std::string_view rest = text;
  while (true) {
    const size_t comma = rest.find(',');
    Result<FormatChoice> choice = ParseFormatChoice(rest.substr(0, comma));
    if (!choice.ok()) return choice.status().WithContext(option);
    formats.push_back(*choice);
    if (comma == std::string_view::npos) return formats;
    rest.remove_prefix(comma + 1);
  }
}

void TargetArguments::Declare(ArgumentList& arguments) {
  arguments.Option(
      "--target-bpw", &target_, RealRange{.without_least = true}, "X",
      "Chooses the format of every matrix: at most X bits per weight, scales included");
  arguments.Option("--sensitivity", &file_, "FILE",
                   "--target-bpw: from `analyze --sensitivity`; default: measured first");
  arguments.Option("--formats", &formats_, "LIST",
                   "--target-bpw: formats to choose from, nf3/g64,nf4/g64");
}

Status TargetArguments::Check() const {
  if (target_ || (!file_ && !formats_)) return {};
  return Invalid(fmt::format("{}: needs --target-bpw", file_ ? "--sensitivity" : "--formats"));
}

Result<std::vector<FormatChoice>> TargetArguments::Formats() const {
  if (!formats_) return std::vector<FormatChoice>();
  return ParseFormatList("--formats", *formats_);
}

Result<FormatAssignment> TargetArguments::Assign(const Checkpoint& source,
                                                 const Sensitivity& sensitivity) const {
  MARLIN_ASSIGN_OR_RETURN(const std::vector<FormatChoice> formats, Formats());
  std::vector<TensorShape> tensors;
  for (const TensorInfo& tensor : source.tensors()) tensors.push_back({tensor.name, tensor.shape});
  return AssignFormats(sensitivity, tensors, *target_, formats);
}

}  // namespace marlin::cli
