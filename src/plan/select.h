// Chooses the kernel of a product: a pure function of the problem, the device and the tables.
#pragma once

#include <optional>
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
Support CheckSupport(const KernelDesc& kernel, const GemmDesc& desc, const DeviceFacts& facts);

/// What there is to choose from.
struct Candidates {
  DeviceFacts facts;
  std::span<const KernelDesc> kernels;
  /// Whether a kernel that supports a problem can cut it so.
  FunctionRef<bool(const KernelDesc&, const GemmDesc&, const KernelVariant&)> can_run_as;
  const TuningTable* measured = nullptr;  ///< Null: rules alone.
  /// Whether rules pass over a kernel that supports a problem, because a later one that does is
  /// expected to take less time. None: never.
  std::optional<FunctionRef<bool(const KernelDesc&, const GemmDesc&)>> passes_over = std::nullopt;
};

struct KernelChoice {
  const KernelDesc* kernel = nullptr;
  KernelVariant variant;  ///< Automatic unless it was asked for or measured.
  bool measured = false;  ///< The table chose, not the rules.

  /// "marlin_gemm_wgmma@128x2"
  std::string ToString() const;
};

/// What rules choose: the first row that supports the problem, may be chosen for it and is not
/// passed over.
/// `forced` names one kernel, perhaps with a variant (kernel_name.h), or is empty.
///
/// Without a forced name the table is asked next. Its kernel is taken if this build has it, it
/// supports the problem in that variant and MayReplace allows it; else the entry does not count.
/// Batch-invariant products are never looked up: what runs them may not depend on m.
///
/// Errors: kInvalidArgument for an unknown name, kUnsupported with the reason of every candidate.
Result<KernelChoice> SelectKernel(const GemmDesc& desc, const Candidates& candidates,
                                  std::string_view forced);

/// Whether measurements may put `kernel` in the place of what rules chose: it must be fit for the
/// accuracy and determinism asked for, and round no more.
bool MayReplace(const KernelDesc& kernel, const KernelDesc& ruled, const GemmDesc& desc);

}  // namespace marlin
