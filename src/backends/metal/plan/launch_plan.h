// How a GEMM is divided among threadgroups: pure functions of the problem and the device. The best
// sizes for each GPU have not been measured.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "backends/metal/runtime/driver.h"
#include "plan/gemm/gemm_desc.h"
#include "plan/gemm/kernel_desc.h"

namespace marlin::metal {

/// Maximum rows per threadgroup of the GEMV kernels.
inline constexpr int64_t kGemvRows = 16;
/// Maximum rows of split-K; above it, decoding each weight twice per tile pays off.
inline constexpr int64_t kSplitKRows = 64;

/// The launches of a GEMM: one, plus one or two more if it writes split-K partials.
struct LaunchPlan {
  std::string_view source;
  std::string_view function;
  std::array<uint32_t, 3> threadgroups{1, 1, 1};
  uint32_t threads = 128;
  int64_t rows = 1;        ///< Rows of A per threadgroup.
  int splits = 1;          ///< Splits of k (split-K).
  int steps_of_split = 0;  ///< Steps per split: chunks of 128 k; staged kernels: blocks of 32 k.
  int units = 0;           ///< Staged: work units, each one split of one tile.
  int units_of_group = 1;  ///< Staged: work units per threadgroup.
  bool partial = false;    ///< Partials go to the workspace; marlin_finish reduces them.
  bool zeroes = false;     ///< marlin_zero_reduction clears the workspace first.
};

/// Simdgroups per GEMV threadgroup with one strip each, or if `paired` with the gate strip for one
/// half and the up strip for the other; a small n gets more per strip, but none is without a chunk.
/// Must depend on n and k only, because it determines the order of sums and so batch invariance.
int64_t GemvSimdgroups(int64_t strips, int64_t chunks, bool paired);

/// Precondition: the kernel supports the problem, whose m and n are not 0.
LaunchPlan PlanLaunch(const KernelDesc& kernel, const GemmDesc& desc, const DeviceShape& device);

/// Workspace bytes for the split-K partials.
int64_t PartialBytes(const LaunchPlan& plan, const GemmDesc& desc);

}  // namespace marlin::metal
