// Programs that models are quantized for, and which recipes they load.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "marlin/checkpoint.h"
#include "marlin/recipe.h"
#include "marlin/status.h"

#pragma GCC visibility push(default)
namespace marlin {

/// A program that loads what ConvertCheckpoint writes, without this library.
struct Destination {
  std::string_view name;    ///< "llama.cpp", "mlx-lm", "vllm", "transformers".
  std::string_view target;  ///< The entry of ConversionTargets() that it reads.
  std::string_view suffix;  ///< End of the output's name if that is a file, otherwise empty.
  std::string_view choice;  ///< The format and the groups of RecipeFor, "s4/g128".
  bool source_scales;       ///< Scales have the type of the source's weights, otherwise fp16.
};

/// All destinations.
std::span<const Destination> AllDestinations();
/// Finds one by name. Errors: kInvalidArgument listing the known names.
Result<Destination> FindDestination(std::string_view name);

/// A recipe that the destination loads: its usual format, in smaller groups where its own do not
/// divide a matrix, which stays as it is if none do. Errors: as CheckRecipeFor.
Result<MixedPrecisionConfig> RecipeFor(const Destination& destination, const Checkpoint& source);

/// Whether the destination loads a source quantized by a recipe and written by ConvertCheckpoint.
/// Errors: kUnsupported naming the first matrix that it does not load, why, and what it loads;
/// as planning the recipe.
Status CheckRecipeFor(const Destination& destination, const Checkpoint& source,
                      const MixedPrecisionConfig& recipe);

}  // namespace marlin
#pragma GCC visibility pop
