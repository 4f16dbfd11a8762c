// The whole run: enumerate, execute, count, report.
#pragma once

#include <string>

#include "runner.h"

namespace marlin::conformance {

struct SuiteOptions {
  std::string name;
  std::string filter;
  std::string device = "all";  ///< "cpu", "cuda", "metal" or "all".
  std::string level;           ///< Of the CPU: "avx2" judges the rows of that level alone.
  int jobs = 1;                ///< Problems made and judged at a time; 0: one per processor.
  int repetitions = kRepetitions;
  bool large = false;
  bool list = false;
  bool json = false;
  bool nightly = false;
  bool stop_at_failure = false;
  std::string expected_path;
  std::string write_expected_path;
  std::string write_models_path;
  std::string check_models_path;
};

/// Runs what the options ask for. Returns the exit code: 0 when nothing failed and no pinned count
/// fell.
int RunSuite(const SuiteOptions& options);

}  // namespace marlin::conformance
