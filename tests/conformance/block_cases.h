// Problems that exceed the first cache block of the CPU drivers.
#pragma once

#include <vector>

#include "case.h"

namespace marlin::conformance {

/// Number of threads of the CPU devices under test.
inline constexpr int kCpuThreads = 2;

/// Adds problems with more rows than one MC block, with more columns than one epilogue block, and
/// with more than one task of maximum size. Sizes come from the blocking of the vector kernels and
/// of the AMX kernel, so every level gets them on every machine.
void AddBlockEdges(std::vector<Case>* cases);

}  // namespace marlin::conformance
