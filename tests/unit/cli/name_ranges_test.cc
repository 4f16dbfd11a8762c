#include "cli/name_ranges.h"

#include <gtest/gtest.h>

namespace marlin::cli::name_ranges_test {
namespace {

std::vector<std::string> Merged(const std::vector<NamedKind>& names) {
  std::vector<std::string> merged;
  for (const NameRange& range : MergeNames(names)) merged.push_back(range.name);
  return merged;
}

/// The names "l.N.w" of one kind.
std::vector<NamedKind> Layers(const std::vector<int>& numbers, const std::string& kind) {
  std::vector<NamedKind> names;
  for (const int number : numbers) names.push_back({"l." + std::to_string(number) + ".w", kind});
  return names;
}

TEST(MergeNames, KeepsNamesWithoutNumbers) {
  const std::vector<std::string> expected = {"b.weight", "a.weight"};
  EXPECT_EQ(Merged({{"b.weight", "x"}, {"a.weight", "x"}}), expected);
  EXPECT_TRUE(Merged({}).empty());
}

TEST(MergeNames, MergesLayersInNumericOrder) {
  EXPECT_EQ(Merged(Layers({0, 1, 10, 11, 2}, "x")), std::vector<std::string>{"l.0-2,10-11.w"});
}

TEST(MergeNames, KeepsKindsApart) {
  std::vector<NamedKind> names = Layers({1, 2, 4}, "x");
  const std::vector<NamedKind> others = Layers({0, 3, 5, 6, 7}, "y");
  names.insert(names.end(), others.begin(), others.end());
  const std::vector<std::string> expected = {"l.0,3,5-7.w", "l.1-2,4.w"};
  EXPECT_EQ(Merged(names), expected);
}

TEST(MergeNames, MergesExpertsAndLayers) {
  std::vector<NamedKind> names;
  for (const char* const name : {"l.0.e.0.w", "l.0.e.1.w", "l.1.e.0.w", "l.1.e.1.w", "l.2.e.0.w"}) {
    names.push_back({name, "x"});
  }
  // Layer 2 has no expert 1, so no range of both says what there is.
  const std::vector<std::string> expected = {"l.0-1.e.0-1.w", "l.2.e.0.w"};
  EXPECT_EQ(Merged(names), expected);
  EXPECT_EQ(MergeNames(names).front().members, (std::vector<size_t>{0, 1, 2, 3}));
}

TEST(MergeNames, CutsLongListsInTheMiddle) {
  std::vector<int> even;
  for (int i = 0; i < 96; i += 2) even.push_back(i);
  EXPECT_EQ(Merged(Layers(even, "x")),
            std::vector<std::string>{"l.0,2,4,6,8,10,12,14,16,18,...,94.w"});
}

TEST(MergeNames, MergesByNumbersThatAreCut) {
  // Both lists of experts are cut to the same text, but are different.
  std::vector<NamedKind> names;
  for (int expert = 0; expert < 60; expert += 2) {
    names.push_back({"l.0.e." + std::to_string(expert) + ".w", "x"});
    if (expert != 30) names.push_back({"l.1.e." + std::to_string(expert) + ".w", "x"});
  }
  EXPECT_EQ(MergeNames(names).size(), 2U);
}

TEST(MergeNames, LeavesOtherDigitsAlone) {
  const std::vector<std::string> expected = {"l.00.w", "l.0.w", "l.99999999999.w", "l..w"};
  EXPECT_EQ(Merged({{"l.00.w", "x"}, {"l.0.w", "x"}, {"l.99999999999.w", "x"}, {"l..w", "x"}}),
            expected);
}

}  // namespace
}  // namespace marlin::cli::name_ranges_test
