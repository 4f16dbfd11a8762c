// The rows of kernels.def as kernel descriptors; none in builds without CUDA.
#pragma once

#include <span>

#include "plan/kernel_desc.h"

namespace marlin::cuda {

std::span<const KernelDesc> CudaKernels();

}  // namespace marlin::cuda
