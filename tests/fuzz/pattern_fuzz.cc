// Globs and regular expressions of recipes, against tensor names: bounded time, and globs match
// according to their definition. Input: "g" or "r", the pattern, then names, one per line.
#include <string>
#include <vector>

#include "fuzz_target.h"
#include "marlin/recipe.h"
#include "recipe/glob.h"

namespace {

using namespace marlin;

constexpr size_t kMostNames = 64;
constexpr size_t kLongestName = 1024;  ///< The limit on names of tensors in files.
constexpr size_t kMostCells = 1 << 16;

/// The definition: a table of the matching prefixes.
bool MatchesByDefinition(std::string_view pattern, std::string_view text) {
  std::vector<bool> row(text.size() + 1, false);
  row[0] = true;
  for (const char c : pattern) {
    std::vector<bool> next(text.size() + 1, false);
    next[0] = row[0] && c == '*';
    for (size_t i = 1; i <= text.size(); ++i) {
      next[i] = c == '*' ? (row[i] || next[i - 1]) : (row[i - 1] && (c == '?' || c == text[i - 1]));
    }
    row = std::move(next);
  }
  return row[text.size()];
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view rest = TextOf(data, size);
  if (rest.empty()) return 0;
  RecipeOverride entry;
  entry.is_regex = rest.front() == 'r';
  rest.remove_prefix(1);
  entry.pattern = TakePart(&rest, "\n");
  entry.choice = *ParseFormatChoice("s8/g32");
  MixedPrecisionConfig recipe;
  const Status added = recipe.AddOverride(entry);
  if (!added.ok()) {
    CheckError(added);
    return 0;
  }
  for (size_t i = 0; i < kMostNames && !rest.empty(); ++i) {
    const std::string_view name = TakePart(&rest, "\n").substr(0, kLongestName);
    const std::string weight = std::string(name) + ".weight";
    const FormatChoice choice = recipe.Choose(weight, {64, 64});
    MARLIN_FUZZ_CHECK(choice.keep || choice == entry.choice);
    if (entry.is_regex || entry.pattern.size() * weight.size() > kMostCells) continue;
    const bool matches = MatchesByDefinition(entry.pattern, weight);
    MARLIN_FUZZ_CHECK(GlobMatch(entry.pattern, weight) == matches);
    MARLIN_FUZZ_CHECK(choice.keep == !matches);
  }
  return 0;
}
