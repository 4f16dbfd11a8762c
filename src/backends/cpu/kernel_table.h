// The rows of kernels.def as kernel descriptors.
#pragma once

#include <span>

#include "plan/kernel_desc.h"

namespace marlin::cpu {

std::span<const KernelDesc> CpuKernels();

/// Backend::Cost, in units that compare the CPU's own kernels. m, n, k > 0.
double CostOf(const KernelDesc& kernel, const GemmDesc& desc);

}  // namespace marlin::cpu
