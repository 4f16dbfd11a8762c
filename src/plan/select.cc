#include "plan/select.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/macros.h"
#include "base/printable.h"
#include "plan/kernel_name.h"

namespace marlin {
namespace {

/// Below this many rows the exact vector kernels keep up with the matrix unit and round less.
/// Measured on a Xeon with AMX, 2026-11-21, bench/records.
constexpr int64_t kMatrixUnitFromM = 5;

/// Whether default accuracy may use a kernel for this problem.
bool FitsDefault(const KernelDesc& kernel, const GemmDesc& desc) {
  if (kernel.grade == Grade::kExact) return true;
  if (kernel.grade == Grade::kW4A8) return desc.accuracy == Accuracy::kW4A8;
  // A GPU's kernels round alike for every m, and say themselves what they promise.
  if (kernel.level == Isa::kSm90 || kernel.level == Isa::kMetal) return true;
  // A grade that depended on m would make a row depend on the rows beside it.
  return desc.determinism == Determinism::kDefault && desc.m >= kMatrixUnitFromM;
}

bool LevelIncludes(Isa device, Isa kernel) {
  for (const Isa gpu : {Isa::kSm90, Isa::kMetal}) {
    if (device == gpu || kernel == gpu) return device == kernel;
  }
  if (device == Isa::kNeon || kernel == Isa::kNeon) {
    return device == kernel || kernel == Isa::kScalar;
  }
  return static_cast<int>(device) >= static_cast<int>(kernel);
}

}  // namespace

const char* GradeName(Grade grade) {
  switch (grade) {
    case Grade::kExact:
      return "exact";
    case Grade::kBf16Compute:
      return "bf16_compute";
    case Grade::kW4A8:
      return "w4a8";
  }
  return "unknown";
}

const char* IsaName(Isa level) {
  switch (level) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAmx:
      return "amx";
    case Isa::kNeon:
      return "neon";
    case Isa::kSm90:
      return "sm_90";
    case Isa::kMetal:
      return "metal";
  }
  return "unknown";
}

std::string GemmDesc::ToString() const {
  return fmt::format("m{}_n{}_k{}_{}_g{}_{}_{}x{}{}{}{}", m, n, k, FormatName(format), group_size,
                     ScaleTypeName(scale_type), DTypeName(a_type), DTypeName(c_type),
                     has_zeros ? "_zeros" : "", has_biases ? "_biases" : "", gated ? "_gated" : "");
}

Support CheckSupport(const KernelDesc& kernel, const GemmDesc& desc, const DeviceFacts& facts) {
  if (!LevelIncludes(facts.level, kernel.level)) {
    return {fmt::format("needs {}, the device runs at {}", IsaName(kernel.level),
                        IsaName(facts.level))};
  }
  return kernel.supports(desc, facts);
}

bool MayReplace(const KernelDesc& kernel, const KernelDesc& ruled, const GemmDesc& desc) {
  return kernel.chosen != Chosen::kByName && desc.determinism == Determinism::kDefault &&
         FitsDefault(kernel, desc) && kernel.grade <= ruled.grade;
}

std::string KernelChoice::ToString() const { return marlin::ToString(kernel->name, variant); }

namespace {

/// A kernel that was asked for by name.
Result<KernelChoice> SelectForced(const GemmDesc& desc, const Candidates& candidates,
                                  std::string_view forced) {
  MARLIN_ASSIGN_OR_RETURN(const KernelName name, ParseKernelName(forced));
  const auto kernel =
      std::find_if(candidates.kernels.begin(), candidates.kernels.end(),
                   [&](const KernelDesc& candidate) { return name.kernel == candidate.name; });
  if (kernel == candidates.kernels.end()) {
    return Status(Code::kInvalidArgument,
                  fmt::format("kernel: unknown name '{}'", Printable(name.kernel)));
  }
  Support support = CheckSupport(*kernel, desc, candidates.facts);
  if (support.ok() && !name.variant.automatic() &&
      !candidates.can_run_as(*kernel, desc, name.variant)) {
    support.reason = fmt::format("has no variant {} for this problem", name.variant.ToString());
  }
  if (support.ok()) return KernelChoice{&*kernel, name.variant, false};
  return Status(Code::kUnsupported, fmt::format("no kernel for {}: {}: {}", desc.ToString(),
                                                kernel->name, support.reason));
}

Result<KernelChoice> SelectByRules(const GemmDesc& desc, const Candidates& candidates) {
  std::string reasons;
  for (const KernelDesc& kernel : candidates.kernels) {
    // Not even asked: answering may load a library.
    if (kernel.chosen != Chosen::kByRules) continue;
    const Support support = CheckSupport(kernel, desc, candidates.facts);
    if (support.ok() && FitsDefault(kernel, desc)) {
      if (candidates.passes_over && (*candidates.passes_over)(kernel, desc)) continue;
      return KernelChoice{&kernel, {}, false};
    }
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", kernel.name,
                           support.ok() ? "not chosen for this m or determinism" : support.reason);
  }
  return Status(Code::kUnsupported, fmt::format("no kernel for {}: {}", desc.ToString(), reasons));
}

}  // namespace

Result<KernelChoice> SelectKernel(const GemmDesc& desc, const Candidates& candidates,
                                  std::string_view forced) {
  if (!forced.empty()) return SelectForced(desc, candidates, forced);
  MARLIN_ASSIGN_OR_RETURN(const KernelChoice ruled, SelectByRules(desc, candidates));
  if (candidates.measured == nullptr || desc.determinism != Determinism::kDefault) return ruled;
  const TuningEntry* const entry = candidates.measured->Find(desc);
  if (entry == nullptr) return ruled;
  for (const KernelDesc& kernel : candidates.kernels) {
    if (entry->kernel != kernel.name) continue;
    const bool runs =
        MayReplace(kernel, *ruled.kernel, desc) &&
        CheckSupport(kernel, desc, candidates.facts).ok() &&
        (entry->variant.automatic() || candidates.can_run_as(kernel, desc, entry->variant));
    return runs ? KernelChoice{&kernel, entry->variant, true} : ruled;
  }
  return ruled;
}

}  // namespace marlin
