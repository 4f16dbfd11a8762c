// The Metal kernel table, built from kernels.def.
#pragma once

#include <span>

#include "plan/kernel_desc.h"

namespace marlin::metal {

std::span<const KernelDesc> MetalKernels();

}  // namespace marlin::metal
