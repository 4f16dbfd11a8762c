// Counts per kernel row, their pinned limits, and the table of error models.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runner.h"

namespace marlin::conformance {

/// The outcomes of one row's cases.
struct RowCounts {
  int64_t passed = 0;
  int64_t failed = 0;
  int64_t unsupported = 0;
  int64_t mistrusted = 0;
  int64_t skipped = 0;
  double worst_ratio = 0;
  std::string worst_case;
};
/// In the order of Machine::rows().
using Counts = std::vector<RowCounts>;

/// The file of a machine's pinned counts. A CUDA device runs Hopper's kernels or code of 9.0 and
/// later without them, of 8.9 with fp8 products, or of 8.0, which take different cases: for all but
/// the first the file has a name of its own, "expected_counts_cuda_80.json".
std::string CountsPath(const std::string& path, const std::optional<DeviceProperties>& cuda);

/// Compares with the pinned counts, of code 8.0 where a later code has none: a row that this
/// machine can run must not pass fewer cases than pinned, nor have more unsupported or mistrusted
/// ones. Returns one line per violation. Rows are "predicted" until WriteCounts has counted them.
std::vector<std::string> CompareCounts(const Machine& machine, const Counts& counts,
                                       const std::string& path);

/// Writes the counts; rows that this machine cannot run keep their pinned numbers.
Status WriteCounts(const Machine& machine, const Counts& counts, const std::string& path);

/// Writes the table of declared error models of all backends with the worst ratios of the rows that
/// ran. Rows that did not run keep the file's ratio if their declared model is unchanged; a backend
/// that is not in this build keeps its section.
Status WriteModels(const Machine& machine, const Counts& counts, const std::string& path);

/// Returns empty, or why the declared part of the file differs from the kernel tables.
std::string CompareModels(const std::string& path);

Status WriteText(const std::string& path, const std::string& text);

}  // namespace marlin::conformance
