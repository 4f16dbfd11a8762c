// The Metal kernel table, built from kernels.def.
#pragma once

#include <span>

#include "backends/metal/runtime/driver.h"
#include "plan/gemm/kernel_desc.h"

namespace marlin::metal {

std::span<const KernelDesc> MetalKernels();

/// Backend::Cost: the row's index in kernels.def, because no Apple GPU has been measured.
double CostOf(const KernelDesc& kernel, const GemmDesc& desc);

/// The device properties that selection uses.
DeviceProperties PropertiesOf(const DeviceShape& device);

}  // namespace marlin::metal
