// Names of kernels, perhaps with a tiling: "marlin_gemm_wgmma" or "marlin_gemm_wgmma@128x2".
#pragma once

#include <string>
#include <string_view>

#include "marlin/status.h"
#include "plan/gemm/kernel_desc.h"

namespace marlin {

struct KernelName {
  std::string_view kernel;  ///< A part of the parsed text.
  KernelVariant variant;
};

/// Errors: kInvalidArgument for anything but NAME or NAME@WIDTHxSPLITS with numbers from 1 up.
Result<KernelName> ParseKernelName(std::string_view text);

/// The name with its variant, unless the variant is left to the kernel.
std::string ToString(std::string_view kernel, const KernelVariant& variant);

}  // namespace marlin
