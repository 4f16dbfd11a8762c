// How a GEMM is divided among threadgroups: pure functions of the problem and the device. Which
// sizes are best on which GPU has not been measured.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "backends/metal/driver.h"
#include "plan/gemm_desc.h"
#include "plan/kernel_desc.h"

namespace marlin::metal {

/// Rows that the kernels for few rows take at a time.
inline constexpr int64_t kGemvRows = 16;
/// From more rows on weights are worth decoding twice.
inline constexpr int64_t kSplitKRows = 64;

/// What runs a product: one launch and, where its sums are partial, one or two more.
struct LaunchPlan {
  std::string_view source;
  std::string_view function;
  std::array<uint32_t, 3> threadgroups{1, 1, 1};
  uint32_t threads = 128;
  int splits = 1;          ///< Parts of k with sums of their own.
  int steps_of_split = 0;  ///< Chunks of 128 k, or blocks of 32 for staged kernels.
  int units = 0;           ///< Staged: pairs of a tile and a split.
  int units_of_group = 1;  ///< Staged: of a threadgroup.
  bool partial = false;    ///< Sums go to the workspace, and marlin_finish finishes them.
  bool zeroes = false;     ///< marlin_zero_reduction runs first.
};

/// Precondition: the kernel supports the problem, whose m and n are not 0.
LaunchPlan PlanLaunch(const KernelDesc& kernel, const GemmDesc& desc, const DeviceShape& device);

/// Bytes of partial sums.
int64_t PartialBytes(const LaunchPlan& plan, const GemmDesc& desc);

}  // namespace marlin::metal
