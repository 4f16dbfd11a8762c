// The rows of kernels.def as kernel descriptors, in builds with CUDA and without.
#pragma once

#include <span>

#include "plan/kernel_desc.h"

namespace marlin::cuda {

std::span<const KernelDesc> CudaKernels();

/// Activations that the tile kernels read as they are: bf16, and fp16 where the weights fit.
bool NeedsStaging(const GemmDesc& desc);

}  // namespace marlin::cuda
