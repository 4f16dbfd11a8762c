#include "cli/destination_argument.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <system_error>
#include <vector>

#include "base/macros.h"
#include "base/printable.h"

namespace marlin::cli {

Status CheckOutput(const Destination& destination, const std::string& output, bool overwrite) {
  if (!output.ends_with(destination.suffix)) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: {} loads one file, whose name must end in {}", Printable(output),
                              destination.name, destination.suffix));
  }
  std::error_code ignored;
  if (overwrite || !std::filesystem::exists(output, ignored)) return {};
  return Status(Code::kInvalidArgument,
                fmt::format("{}: exists already; --overwrite replaces it", Printable(output)));
}

std::string IntermediateDirectory(const std::string& output) {
  std::filesystem::path path(output);
  if (!path.has_filename()) path = path.parent_path();  // It ended in a slash.
  return (path.parent_path() / ("." + path.filename().string() + ".quantized")).string();
}

void DestinationArgument::Declare(ArgumentList& arguments) {
  std::vector<std::string_view> names;
  for (const Destination& destination : AllDestinations()) names.push_back(destination.name);
  arguments.Option("--for", &name_, "PROGRAM",
                   fmt::format("Write what a program loads, in a recipe that it loads: {}",
                               fmt::join(names, ", "))
                       .c_str());
  arguments.Choices({names.begin(), names.end()});
}

Status DestinationArgument::Check(const std::string& output, bool overwrite) const {
  if (!name_) return {};
  const Result<Destination> destination = FindDestination(*name_);
  if (!destination.ok()) return destination.status().WithContext("--for");
  return CheckOutput(*destination, output, overwrite);
}

Result<MixedPrecisionConfig> DestinationArgument::Recipe(const RecipeArguments& recipe,
                                                         const Checkpoint& source) const {
  MARLIN_ASSIGN_OR_RETURN(const Destination destination, FindDestination(*name_));
  MixedPrecisionConfig base;
  if (!recipe.names_recipe()) {
    MARLIN_ASSIGN_OR_RETURN(base, RecipeFor(destination, source));
  }
  MARLIN_ASSIGN_OR_RETURN(MixedPrecisionConfig built, recipe.Build(base));
  MARLIN_RETURN_IF_ERROR(CheckRecipeFor(destination, source, built));
  return built;
}

Result<ConvertCheckpointReport> DestinationArgument::Export(
    const std::string& output, ConvertCheckpointOptions options) const {
  MARLIN_ASSIGN_OR_RETURN(const Destination destination, FindDestination(*name_));
  options.target = destination.target;
  const std::string quantized = IntermediateDirectory(output);
  Result<ConvertCheckpointReport> report = ConvertCheckpoint(quantized, output, options);
  if (!report.ok()) {
    return Status(report.status().code(),
                  fmt::format("{}; the quantized directory is kept: {}", report.status().message(),
                              Printable(quantized)));
  }
  std::error_code error;
  std::filesystem::remove_all(quantized, error);
  if (!error) return report;
  return Status(Code::kIo,
                fmt::format("{}: cannot be removed: {}", Printable(quantized), error.message()));
}

}  // namespace marlin::cli
