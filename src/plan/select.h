// Chooses the kernel of a product: a pure function of the problem, the device and the table.
#pragma once

#include <span>
#include <string_view>

#include "marlin/status.h"
#include "plan/gemm_desc.h"
#include "plan/kernel_desc.h"

namespace marlin {

/// Whether a kernel can run a problem on a device: its level is there and its own conditions hold.
Support CheckSupport(const KernelDesc& kernel, const GemmDesc& desc, const DeviceFacts& facts);

/// The kernel to run. `forced` names one kernel, or is empty. Errors: kInvalidArgument for an
/// unknown name, kUnsupported with the reason of every candidate.
Result<const KernelDesc*> SelectKernel(const GemmDesc& desc, const DeviceFacts& facts,
                                       std::span<const KernelDesc> kernels,
                                       std::string_view forced);

}  // namespace marlin
