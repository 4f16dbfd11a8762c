// Which problems are tried: a deterministic selection in which every pair of properties occurs.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "case.h"
#include "plan/kernel_desc.h"

namespace marlin::conformance {

/// How many problems to select: the default set, and the larger one of the nightly run.
struct SelectionSize {
  int gemm = 1000;
  int dequantize = 160;
};

/// All problems, kernel left empty: each runs on every row of its op. A pure function of the
/// arguments; tile sizes of the rows decide the shape classes.
std::vector<Case> SelectProblems(std::span<const KernelDesc> rows, const SelectionSize& size);

/// The properties of a case whose pairs are covered, e.g. "format=u4"; for the coverage report.
std::vector<std::string> Properties(const Case& c);

}  // namespace marlin::conformance
