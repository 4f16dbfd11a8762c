// Problems that reach past the first block of the CPU's drivers.
#pragma once

#include <vector>

#include "case.h"

namespace marlin::conformance {

/// Threads of the CPU devices that kernels are judged on.
inline constexpr int kCpuThreads = 2;

/// Adds problems of more rows than one pass of a driver and of more columns than one run of the
/// epilogue, one largest task and one task. Sizes come from the blocking of the row kernels and of
/// the AMX kernel, so that every level has them on every machine.
void AddBlockEdges(std::vector<Case>* cases);

}  // namespace marlin::conformance
