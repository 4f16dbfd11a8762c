// The whole run: enumerates, executes, counts and reports.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "runner.h"

namespace marlin::conformance {

struct SuiteOptions {
  std::string name;
  std::string filter;
  std::string device = "all";  ///< "cpu", "cuda", "metal" or "all".
  std::string level;           ///< CPU only: "avx2" tests the rows of that level alone.
  int jobs = 1;                ///< Problems in flight; 0: one per processor.
  int repetitions = kRepetitions;
  bool large = false;
  bool list = false;
  bool json = false;
  bool progress = false;  ///< Prints "case NAME" on stderr before each case.
  bool nightly = false;
  bool stop_at_failure = false;
  bool mixed = false;  ///< Takes problems of all formats and shapes in turn.
  std::string expected_path;
  std::string write_expected_path;
  std::string write_models_path;
  std::string check_models_path;
};

/// The order in which `count` problems run: indexes of the list. Neighbours in the list have a
/// format or a shape in common; a mixed order steps through the list by a golden section of it, so
/// that any few problems in a row come from everywhere.
std::vector<size_t> RunOrder(size_t count, bool mixed);

/// Runs the selected cases. Returns the exit code: 0 if nothing failed and no pinned count fell.
int RunSuite(const SuiteOptions& options);

}  // namespace marlin::conformance
