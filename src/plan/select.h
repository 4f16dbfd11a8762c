// Chooses the kernel of a product: a pure function of the problem, the device and the tables.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "base/function_ref.h"
#include "marlin/status.h"
#include "plan/gemm_desc.h"
#include "plan/kernel_desc.h"
#include "plan/tuning_table.h"

namespace marlin {

/// Whether a kernel can run a problem on a device: its level is there and its own conditions hold.
Support CheckSupport(const KernelDesc& kernel, const GemmDesc& desc,
                     const DeviceProperties& device);

/// The kernels of a device and the questions that selection asks about them; as in Backend.
struct Candidates {
  DeviceProperties device;
  std::span<const KernelDesc> kernels;
  FunctionRef<double(const KernelDesc&, const GemmDesc&)> cost;
  FunctionRef<bool(const KernelDesc&, const GemmDesc&, const KernelVariant&)> can_run_as;
  const TuningTable* measured = nullptr;  ///< Null: estimates alone.
};

struct KernelChoice {
  const KernelDesc* kernel = nullptr;
  KernelVariant variant;  ///< Automatic unless it was asked for or measured.
  bool measured = false;  ///< The table chose, not the estimates.

  /// "marlin_gemm_wgmma@128x2"
  std::string ToString() const;
};

/// Chooses the kernel with the least estimated cost of those that support the problem and may be
/// chosen by cost; of equals the first. `forced` names one kernel, perhaps with a tiling
/// (kernel_name.h), or is empty.
///
/// Without a forced name a measured table overrides the estimate: its kernel is taken if this build
/// has it, it supports the problem in that tiling and MayReplace allows it; else the entry does not
/// count. Batch-invariant problems are never looked up: their kernel may not depend on m.
///
/// Allocates nothing on success unless the table is asked. Errors: kInvalidArgument for an unknown
/// name, kUnsupported with the reason of every candidate.
Result<KernelChoice> SelectKernel(const GemmDesc& desc, const Candidates& candidates,
                                  std::string_view forced);

/// Whether a measured entry may put `kernel` in the place of the estimate's choice: it must not be
/// reserved for its name, and must round no more.
bool MayReplace(const KernelDesc& kernel, const KernelDesc& estimated, const GemmDesc& desc);

}  // namespace marlin
