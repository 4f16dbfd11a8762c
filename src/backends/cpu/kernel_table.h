// The rows of kernels.def as kernel descriptors.
#pragma once

#include <span>

#include "plan/kernel_desc.h"

namespace marlin::cpu {

std::span<const KernelDesc> CpuKernels();

}  // namespace marlin::cpu
