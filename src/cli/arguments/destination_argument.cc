#include "cli/arguments/destination_argument.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <utility>
#include <vector>

#include "base/macros.h"
#include "checkpoint/convert/destination_output.h"

namespace marlin::cli {

void DestinationArgument::Declare(ArgumentList& arguments) {
  std::vector<std::string> names;
  for (const Destination& destination : AllDestinations()) names.emplace_back(destination.name);
  arguments.Option("--for", &name_, "PROGRAM",
                   fmt::format("Write what a program loads, in a recipe that it loads: {}",
                               fmt::join(names, ", "))
                       .c_str());
  arguments.Choices(std::move(names));
}

Status DestinationArgument::Check(const std::string& output, bool overwrite) const {
  if (!name_) return {};
  const Result<Destination> destination = FindDestination(*name_);
  if (!destination.ok()) return destination.status().WithContext("--for");
  return CheckDestinationOutput(*destination, output, overwrite);
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
    const std::string& quantized, const std::string& output,
    ConvertCheckpointOptions options) const {
  MARLIN_ASSIGN_OR_RETURN(const Destination destination, FindDestination(*name_));
  options.target = destination.target;
  return ConvertCheckpoint(quantized, output, options);
}

}  // namespace marlin::cli
