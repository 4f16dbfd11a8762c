#include "cli/arguments/suggestion.h"

#include <fmt/core.h>

#include <algorithm>
#include <vector>

namespace marlin::cli {
namespace {

/// Longer words are no typing mistakes.
constexpr size_t kLongestWord = 40;

/// Letters to insert, remove, replace or swap with the next to turn one word into another.
size_t EditDistance(std::string_view from, std::string_view to) {
  std::vector<std::vector<size_t>> edits(from.size() + 1, std::vector<size_t>(to.size() + 1));
  for (size_t i = 0; i <= from.size(); ++i) edits[i][0] = i;
  for (size_t j = 0; j <= to.size(); ++j) edits[0][j] = j;
  for (size_t i = 1; i <= from.size(); ++i) {
    for (size_t j = 1; j <= to.size(); ++j) {
      const size_t replaced = edits[i - 1][j - 1] + (from[i - 1] == to[j - 1] ? 0 : 1);
      edits[i][j] = std::min({edits[i - 1][j] + 1, edits[i][j - 1] + 1, replaced});
      const bool swapped = i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1];
      if (swapped) edits[i][j] = std::min(edits[i][j], edits[i - 2][j - 2] + 1);
    }
  }
  return edits[from.size()][to.size()];
}

}  // namespace

std::string_view NearestWord(std::string_view word, std::span<const std::string> known) {
  const size_t letters = word.size() - std::min(word.find_first_not_of('-'), word.size());
  if (letters < 2 || word.size() > kLongestWord) return {};
  std::string_view nearest;
  size_t least = letters / 3 + 1;
  for (const std::string& each : known) {
    if (each.starts_with(word)) return each;
    const size_t distance = EditDistance(word, each);
    if (distance > least || (distance == least && !nearest.empty())) continue;
    least = distance;
    nearest = each;
  }
  return nearest;
}

std::string DidYouMean(std::string_view word, std::span<const std::string> known) {
  const std::string_view nearest = NearestWord(word, known);
  return nearest.empty() ? std::string() : fmt::format("; did you mean '{}'?", nearest);
}

}  // namespace marlin::cli
