// --for: the program that a quantized checkpoint is for.
#pragma once

#include <optional>
#include <string>

#include "cli/arguments/arguments.h"
#include "cli/arguments/recipe_arguments.h"
#include "marlin/checkpoint.h"
#include "marlin/destination.h"

namespace marlin::cli {

class DestinationArgument {
 public:
  void Declare(ArgumentList& arguments);
  bool given() const { return name_.has_value(); }
  const std::string& name() const { return *name_; }
  /// Errors: kInvalidArgument for an unknown name, as CheckDestinationOutput.
  Status Check(const std::string& output, bool overwrite) const;

  /// The recipe that the options describe, by default the destination's. Errors: as
  /// RecipeArguments::Build and CheckRecipeFor.
  Result<MixedPrecisionConfig> Recipe(const RecipeArguments& recipe,
                                      const Checkpoint& source) const;
  /// Writes the output from a quantized directory. Errors: as ConvertCheckpoint.
  Result<ConvertCheckpointReport> Export(const std::string& quantized, const std::string& output,
                                         ConvertCheckpointOptions options) const;

 private:
  std::optional<std::string> name_;
};

}  // namespace marlin::cli
