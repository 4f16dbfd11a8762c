// Selection of the problems: deterministic, covering every pair of properties.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "case.h"
#include "plan/gemm/kernel_desc.h"

namespace marlin::conformance {

/// Number of problems to select: the default set, and the larger one of the nightly run.
struct SelectionSize {
  int gemm = 1000;
  int dequantize = 160;
};

/// Returns all problems for the kernels of a backend with the kernel left empty: each runs on every
/// row of its op. A pure function of the arguments; on the CPU the tile sizes of the rows decide
/// the shapes.
std::vector<Case> SelectProblems(std::string_view backend, std::span<const KernelDesc> rows,
                                 const SelectionSize& size);

/// Problems of a GPU: shapes around tiles of up to 128 x 256 x 128 and shapes that use split-K.
std::vector<Case> SelectGpuProblems(std::string_view backend, std::span<const KernelDesc> rows,
                                    const SelectionSize& size);

/// Problems with operands of more than 2^31 elements.
std::vector<Case> LargeProblems(std::string_view backend);

}  // namespace marlin::conformance
