#include "plan/gemm/select.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/macros.h"
#include "base/printable.h"
#include "plan/gemm/kernel_name.h"

namespace marlin {
namespace {

bool LevelIncludes(Isa device, Isa kernel) {
  for (const Isa gpu : {Isa::kCuda, Isa::kMetal}) {
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
    case Isa::kCuda:
      return "cuda";
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

std::string Support::reason() const {
  return ok() ? std::string() : fmt::format(fmt::runtime(refusal), number, name, other);
}

Support CheckSupport(const KernelDesc& kernel, const GemmDesc& desc,
                     const DeviceProperties& device) {
  if (!LevelIncludes(device.level, kernel.level)) {
    return {"needs {1}, the device runs at {2}", 0, IsaName(kernel.level), IsaName(device.level)};
  }
  return kernel.supports(desc, device);
}

bool MayReplace(const KernelDesc& kernel, const KernelDesc& estimated, const GemmDesc& desc) {
  return kernel.chosen != Chosen::kByName && desc.determinism == Determinism::kDefault &&
         kernel.grade <= estimated.grade;
}

std::string KernelChoice::ToString() const { return marlin::ToString(kernel->name, variant); }

namespace {

/// Selects a kernel forced by name.
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
  const auto refuse = [&](std::string_view reason) {
    return Status(Code::kUnsupported,
                  fmt::format("no kernel for {}: {}: {}", desc.ToString(), kernel->name, reason));
  };
  const Support support = CheckSupport(*kernel, desc, candidates.device);
  if (!support.ok()) return refuse(support.reason());
  if (!name.variant.automatic() && !candidates.can_run_as(*kernel, desc, name.variant)) {
    return refuse(fmt::format("has no variant {} for this problem", name.variant.ToString()));
  }
  return KernelChoice{&*kernel, name.variant, false};
}

Status RefuseWithReasons(const GemmDesc& desc, const Candidates& candidates) {
  std::string reasons;
  for (const KernelDesc& kernel : candidates.kernels) {
    if (kernel.chosen != Chosen::kByCost) continue;
    const Support support = CheckSupport(kernel, desc, candidates.device);
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", kernel.name, support.reason());
  }
  return Status(Code::kUnsupported, fmt::format("no kernel for {}: {}", desc.ToString(), reasons));
}

Result<KernelChoice> SelectByCost(const GemmDesc& desc, const Candidates& candidates) {
  // Cost estimates need a nonempty problem; an empty one can run on any kernel.
  GemmDesc filled = desc;
  for (int64_t* const size : {&filled.m, &filled.n, &filled.k}) *size = std::max<int64_t>(*size, 1);
  const KernelDesc* best = nullptr;
  double least = 0;
  for (const KernelDesc& kernel : candidates.kernels) {
    // Kernels not selected by cost are not asked for support: answering may load a library.
    if (kernel.chosen != Chosen::kByCost) continue;
    if (!CheckSupport(kernel, desc, candidates.device).ok()) continue;
    const double cost = candidates.cost(kernel, filled);
    if (best != nullptr && cost >= least) continue;
    best = &kernel;
    least = cost;
  }
  if (best == nullptr) return RefuseWithReasons(desc, candidates);
  return KernelChoice{best, {}, false};
}

}  // namespace

Result<KernelChoice> SelectKernel(const GemmDesc& desc, const Candidates& candidates,
                                  std::string_view forced) {
  if (!forced.empty()) return SelectForced(desc, candidates, forced);
  MARLIN_ASSIGN_OR_RETURN(const KernelChoice estimated, SelectByCost(desc, candidates));
  // Tuning tables do not know sparsity: their entries were measured with dense weights.
  if (candidates.measured == nullptr || desc.weights.sparse ||
      desc.determinism != Determinism::kDefault) {
    return estimated;
  }
  const TuningEntry* const entry = candidates.measured->Find(desc);
  if (entry == nullptr) return estimated;
  for (const KernelDesc& kernel : candidates.kernels) {
    if (entry->kernel != kernel.name) continue;
    const bool runs =
        MayReplace(kernel, *estimated.kernel, desc) &&
        CheckSupport(kernel, desc, candidates.device).ok() &&
        (entry->variant.automatic() || candidates.can_run_as(kernel, desc, entry->variant));
    return runs ? KernelChoice{&kernel, entry->variant, true} : estimated;
  }
  return estimated;
}

}  // namespace marlin
