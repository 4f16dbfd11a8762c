#include "cli/arguments/destination_argument.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/macros.h"
#include "base/printable.h"
#include "checkpoint/files/output_directory.h"

namespace marlin::cli {

Status CheckOutput(const Destination& destination, const std::string& output, bool overwrite) {
  if (!output.ends_with(destination.suffix)) {
    return Status(Code::kInvalidArgument,
                  fmt::format("{}: {} loads one file, whose name must end in {}", Printable(output),
                              destination.name, destination.suffix));
  }
  SystemIo io;
  OutputDirectory::Options options;
  options.overwrite = overwrite;
  if (!destination.suffix.empty()) {
    options.file = std::filesystem::path(output).filename().string();
  }
  return OutputDirectory::Check(io, output, options);
}

Result<IntermediateFolder> IntermediateFolder::Make(const std::string& output) {
  std::filesystem::path path(output);
  if (!path.has_filename()) path = path.parent_path();  // It ended in a slash.
  const std::string folder =
      (path.parent_path() / ("." + path.filename().string() + ".quantized")).string();
  SystemIo io;
  MARLIN_RETURN_IF_ERROR(io.MakeDirectory(folder));
  MARLIN_ASSIGN_OR_RETURN(FileHandle lock, io.LockDirectory(folder));
  if (!lock.open()) {
    return Status(Code::kIo, fmt::format("{}: another process is writing it", Printable(output)));
  }
  return IntermediateFolder(folder, std::move(lock));
}

void IntermediateFolder::Remove() {
  std::error_code ignored;
  if (lock_.open()) std::filesystem::remove_all(path_, ignored);
  lock_ = FileHandle();
}

std::string IntermediateFolder::quantized() const { return path_ + "/model"; }

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
    const std::string& quantized, const std::string& output,
    ConvertCheckpointOptions options) const {
  MARLIN_ASSIGN_OR_RETURN(const Destination destination, FindDestination(*name_));
  options.target = destination.target;
  return ConvertCheckpoint(quantized, output, options);
}

}  // namespace marlin::cli
