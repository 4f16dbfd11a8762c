// Merges the names of equal tensors of all layers and experts into one: "layers.0-47.mlp.gate".
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace marlin::cli {

/// A name of a tensor, and what it must have in common with others to be merged with them.
struct NamedKind {
  std::string name;
  std::string kind;
};

/// Tensors of one kind whose names differ in numbers alone.
struct NameRange {
  /// Numbers that differ are "0-47" or "0,3,5-7"; long lists are cut in the middle.
  std::string name;
  std::vector<size_t> members;  ///< Indices into the list that was merged, ascending.
};

/// Merges names that differ in numbers between dots, if all combinations of the numbers in the
/// merged name exist. Ordered by the first name of each pattern; within a pattern, by
/// number.
std::vector<NameRange> MergeNames(std::span<const NamedKind> names);

}  // namespace marlin::cli
