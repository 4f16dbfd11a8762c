// Runs cases of experts on a device and checks the results.
#pragma once

#include "experts_problem.h"
#include "runner.h"

namespace marlin::conformance {

/// Runs one case on a row. Thread-safe for different data.
CaseResult RunExpertsCase(const Machine& machine, const Row& row, const ExpertsData& data,
                          int repetitions = kRepetitions);

}  // namespace marlin::conformance
