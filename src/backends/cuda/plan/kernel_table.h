// The rows of kernels.def as kernel descriptors, in builds with CUDA and without.
#pragma once

#include <span>
#include <vector>

#include "backends/cuda/plan/kernel_family.h"
#include "plan/gemm/kernel_desc.h"

namespace marlin::cuda {

std::span<const KernelDesc> CudaKernels();

/// Precondition of these functions: the kernel is one of CudaKernels().
const KernelFamily& FamilyOf(const KernelDesc& kernel);
/// Whether the device can run the kernel, whatever the problem.
Support CheckAvailable(const KernelDesc& kernel, const DeviceProperties& device);
/// As Backend::Variants.
std::vector<KernelVariant> VariantsOf(const KernelDesc& kernel, const GemmDesc& desc,
                                      const DeviceShape& device);
/// As Backend::CanRunAs.
bool CanRunAs(const KernelDesc& kernel, const GemmDesc& desc, const DeviceShape& device,
              const KernelVariant& variant);

/// Whether activations are staged in the workspace: the kernels on tiles read bf16, and fp16 where
/// the weights fit fp16, from rows at multiples of 16 bytes.
bool NeedsStaging(const GemmDesc& desc);

}  // namespace marlin::cuda
