// --for: the program that a quantized checkpoint is for.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "checkpoint/files/io.h"
#include "cli/arguments/arguments.h"
#include "cli/arguments/recipe_arguments.h"
#include "marlin/checkpoint.h"
#include "marlin/destination.h"

namespace marlin::cli {

/// Errors: kInvalidArgument for an output whose name is not that of the destination's file, or that
/// exists and is not to be replaced; kIo.
Status CheckOutput(const Destination& destination, const std::string& output, bool overwrite);

/// The folder beside an output that holds the quantized directory until the output is written. What
/// a killed process leaves of it, the next one resumes or replaces.
class IntermediateFolder {
 public:
  /// Errors: kIo, also if another process writes the same output.
  static Result<IntermediateFolder> Make(const std::string& output);
  IntermediateFolder(IntermediateFolder&&) noexcept = default;
  IntermediateFolder& operator=(IntermediateFolder&&) = delete;
  ~IntermediateFolder() { Remove(); }
  std::string quantized() const;
  void Remove();

 private:
  IntermediateFolder(std::string path, FileHandle lock)
      : path_(std::move(path)), lock_(std::move(lock)) {}

  std::string path_;
  FileHandle lock_;  ///< Held, so that two processes cannot mix up their recipes.
};

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
  /// Writes the output from a quantized directory. Errors: those of ConvertCheckpoint.
  Result<ConvertCheckpointReport> Export(const std::string& quantized, const std::string& output,
                                         ConvertCheckpointOptions options) const;

 private:
  std::optional<std::string> name_;
};

}  // namespace marlin::cli
