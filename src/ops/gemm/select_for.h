// Kernel selection on a device, with its tuning table.
#pragma once

#include <string_view>

#include "ops/device/device.h"
#include "plan/gemm/select.h"

namespace marlin {

/// As SelectKernel; without its tuning table if `use_table` is false.
Result<KernelChoice> SelectFor(const Device::Impl& device, const GemmDesc& desc,
                               std::string_view forced = {}, bool use_table = true);

}  // namespace marlin
