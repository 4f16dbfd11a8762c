// The options that select a recipe, shared by quantize and plan.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/arguments/arguments.h"
#include "marlin/recipe.h"
#include "marlin/status.h"

namespace marlin::cli {

class RecipeArguments {
 public:
  void Declare(ArgumentList& arguments);

  bool given() const {
    return recipe_ || format_ || group_size_ || scale_type_ || sparsity_ || hadamard_ ||
           !overrides_.empty();
  }

  /// Whether --recipe or --format is given.
  bool names_recipe() const { return recipe_ || format_; }

  /// The recipe that the options describe; without --recipe and --format, `base` with their
  /// changes. Errors: kInvalidArgument naming the option.
  Result<MixedPrecisionConfig> Build(const MixedPrecisionConfig& base) const;
  /// The same with MixedPrecisionConfig::Default.
  Result<MixedPrecisionConfig> Build(bool has_experts) const {
    return Build(MixedPrecisionConfig::Default(has_experts));
  }

 private:
  Result<MixedPrecisionConfig> Base(const MixedPrecisionConfig& base) const;
  Status ChangeClasses(MixedPrecisionConfig* recipe) const;

  std::optional<std::string> recipe_;
  std::optional<std::string> format_;
  std::optional<int64_t> group_size_;
  std::optional<std::string> scale_type_;
  std::optional<std::string> sparsity_;
  std::optional<int64_t> hadamard_;
  std::vector<std::string> overrides_;
};

}  // namespace marlin::cli
