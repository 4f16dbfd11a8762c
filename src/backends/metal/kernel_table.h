// The Metal kernel table, built from kernels.def.
#pragma once

#include <span>

#include "backends/metal/driver.h"
#include "plan/kernel_desc.h"

namespace marlin::metal {

std::span<const KernelDesc> MetalKernels();

/// What selection may know of a device.
DeviceFacts FactsOf(const DeviceShape& device);

}  // namespace marlin::metal
