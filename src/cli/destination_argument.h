// --for: the program that a quantized checkpoint is for.
#pragma once

#include <optional>
#include <string>

#include "cli/arguments.h"
#include "cli/recipe_arguments.h"
#include "marlin/checkpoint.h"
#include "marlin/destination.h"

namespace marlin::cli {

/// Errors: kInvalidArgument for an output whose name is not that of the destination's file, or that
/// exists and is not to be replaced.
Status CheckOutput(const Destination& destination, const std::string& output, bool overwrite);
/// The quantized directory that an output is written from, beside it.
std::string IntermediateDirectory(const std::string& output);

class DestinationArgument {
 public:
  void Declare(ArgumentList& arguments);
  bool given() const { return name_.has_value(); }
  const std::string& name() const { return *name_; }
  /// Errors: kInvalidArgument for an unknown name, those of CheckOutput.
  Status Check(const std::string& output, bool overwrite) const;

  /// The recipe that the options describe, by default the destination's. Errors: those of
  /// RecipeArguments::Build and CheckRecipeFor.
  Result<MixedPrecisionConfig> Recipe(const RecipeArguments& recipe,
                                      const Checkpoint& source) const;
  /// Writes the output from IntermediateDirectory, and removes that. Errors: those of
  /// ConvertCheckpoint; the directory is kept then.
  Result<ConvertCheckpointReport> Export(const std::string& output,
                                         ConvertCheckpointOptions options) const;

 private:
  std::optional<std::string> name_;
};

}  // namespace marlin::cli
