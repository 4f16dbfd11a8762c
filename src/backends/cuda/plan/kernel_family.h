// The host side of a family of kernels: the queries of selection, tuning and `name@variant`. Pure
// functions of the problem and the device.
//
// A family is a folder of kernels/: <family>_plan.cc defines <Family>Family and the Supports
// functions of its rows in kernels.def, and needs no CUDA; <family>_launch.cc defines Make<Family>,
// which plans a launch (common/cuda_gemm.h).
#pragma once

#include <vector>

#include "backends/cuda/plan/tile_problem.h"
#include "plan/gemm/gemm_desc.h"
#include "plan/gemm/kernel_desc.h"

namespace marlin::cuda {

struct KernelFamily {
  /// The estimated time of a supported problem; m, n, k > 0.
  double (*microseconds)(const GemmDesc& desc, const DeviceShape& device);
  /// As Backend::Variants, for m, n, k > 0; null: the kernel has one tiling.
  std::vector<KernelVariant> (*variants)(const GemmDesc& desc, const DeviceShape& device);
  /// As Backend::CanRunAs, for m, n, k > 0; null: never.
  bool (*can_run_as)(const GemmDesc& desc, const DeviceShape& device, const KernelVariant& variant);
  bool takes_empty_k = false;  ///< Supports k = 0; otherwise the exact kernel stores the zeros.
  /// Whether the device can run the kernels at all, whatever the problem; null: any can.
  Support (*available)(const DeviceProperties& device) = nullptr;
};

/// Conditions common to the kernels that multiply tiled weights as 16-bit operands: dense tiles, or
/// sparse ones.
Support SupportsTiles(const GemmDesc& desc, bool sparse = false);
/// Conditions of the exact kernels.
Support SupportsExact(const GemmDesc& desc, const DeviceProperties& device);

/// Support, or why not, of kernels on Hopper's asynchronous products.
Support NeedsWgmma(const DeviceProperties& device);

/// The largest m that kernels index in 32 bits.
inline constexpr int64_t kMostRows = (int64_t{1} << 30) - 1;

}  // namespace marlin::cuda
