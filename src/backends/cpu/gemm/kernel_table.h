// The CPU kernel table, built from kernels.def.
#pragma once

#include <span>

#include "plan/gemm/kernel_desc.h"

namespace marlin::cpu {

std::span<const KernelDesc> CpuKernels();

/// Whether a kernel is one of gemv_kernel.h.
bool IsGemv(const KernelDesc& kernel);
/// Whether a kernel is one of sparse_kernel.h: on AVX-512 BF16, or on AVX2.
bool IsSparseGemv(const KernelDesc& kernel);
bool IsSparseGemm(const KernelDesc& kernel);

/// Backend::Cost, in arbitrary units, comparable among CPU kernels only. m, n, k > 0.
double CostOf(const KernelDesc& kernel, const GemmDesc& desc, const DeviceProperties& device);

}  // namespace marlin::cpu
