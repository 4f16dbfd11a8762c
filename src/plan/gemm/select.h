// Kernel selection: a pure function of the problem, the device and the tables.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "base/function_ref.h"
#include "marlin/status.h"
#include "plan/gemm/gemm_desc.h"
#include "plan/gemm/kernel_desc.h"
#include "plan/gemm/tuning_table.h"

namespace marlin {

/// Whether a kernel can run a problem on a device: its ISA level is available and `supports`
/// accepts.
Support CheckSupport(const KernelDesc& kernel, const GemmDesc& desc,
                     const DeviceProperties& device);

/// A device's kernels and the queries that selection makes about them; as in Backend.
struct Candidates {
  DeviceProperties device;
  std::span<const KernelDesc> kernels;
  FunctionRef<double(const KernelDesc&, const GemmDesc&)> cost;
  FunctionRef<bool(const KernelDesc&, const GemmDesc&, const KernelVariant&)> can_run_as;
  const TuningTable* measured = nullptr;  ///< Null: estimates only.
};

struct KernelChoice {
  const KernelDesc* kernel = nullptr;
  KernelVariant variant;  ///< Automatic unless forced or measured.
  bool measured = false;  ///< Selected by the table, not by estimates.

  /// "marlin_gemm_wgmma@128x2"
  std::string ToString() const;
};

/// Selects the kernel with the least estimated cost among those that support the problem and may be
/// selected by cost; ties keep the first. `forced` names one kernel, perhaps with a tiling
/// (kernel_name.h), or is empty.
///
/// Without a forced name a measured table overrides the estimate: its kernel is taken if this build
/// has it, it supports the problem in that tiling and MayReplace allows it; otherwise the entry is
/// ignored. Batch-invariant problems are never looked up: their kernel must not depend on m.
///
/// Allocates nothing on success unless it looks up the table. Errors: kInvalidArgument for an
/// unknown name, kUnsupported with the reason of every candidate.
Result<KernelChoice> SelectKernel(const GemmDesc& desc, const Candidates& candidates,
                                  std::string_view forced);

/// Whether a measured entry may replace the estimated kernel with `kernel`: it must not be
/// restricted to kByName, and must not be less accurate.
bool MayReplace(const KernelDesc& kernel, const KernelDesc& estimated, const GemmDesc& desc);

}  // namespace marlin
