// The host side of a family of kernels: what selection, tuning and `name@variant` ask before
// anything is launched. Pure functions of the problem and the device.
//
// A family is a folder of kernels/: <family>_plan.cc defines <Family>Family and the Supports
// functions of its rows in kernels.def, and needs no CUDA; <family>_launch.cc defines Make<Family>,
// which plans a launch (kernels/common/launch_plan.h).
#pragma once

#include <vector>

#include "backends/cuda/plan/tile_problem.h"
#include "plan/gemm_desc.h"
#include "plan/kernel_desc.h"

namespace marlin::cuda {

struct KernelFamily {
  /// The expected time of a problem that the kernel supports; m, n, k > 0.
  double (*microseconds)(const GemmDesc& desc, const DeviceShape& device);
  /// As Backend::Variants, for m, n, k > 0; null: there is one tiling.
  std::vector<KernelVariant> (*variants)(const GemmDesc& desc, const DeviceShape& device);
  /// As Backend::CanRunAs, for m, n, k > 0; null: never.
  bool (*can_run_as)(const GemmDesc& desc, const DeviceShape& device, const KernelVariant& variant);
  bool takes_empty_k = false;  ///< k may be 0; else the exact kernel writes the zeros.
};

/// The conditions of every kernel that multiplies weights in tiles with 16-bit operands.
Support SupportsTiles(const GemmDesc& desc);

/// The most rows that kernels count in 32 bits.
inline constexpr int64_t kMostRows = (int64_t{1} << 30) - 1;

}  // namespace marlin::cuda
