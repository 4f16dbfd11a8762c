#include "plan/select.h"

#include <fmt/format.h>

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
  if (kernel.level == Isa::kSm90) return true;
  // A grade that depended on m would make a row depend on the rows beside it.
  return desc.determinism == Determinism::kDefault && desc.m >= kMatrixUnitFromM;
}

bool LevelIncludes(Isa device, Isa kernel) {
  if (device == Isa::kSm90 || kernel == Isa::kSm90) return device == kernel;
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

Result<const KernelDesc*> SelectKernel(const GemmDesc& desc, const DeviceFacts& facts,
                                       std::span<const KernelDesc> kernels,
                                       std::string_view forced) {
  std::string reasons;
  for (const KernelDesc& kernel : kernels) {
    if (forced.empty() ? kernel.only_by_name : forced != kernel.name) continue;
    const Support support = CheckSupport(kernel, desc, facts);
    if (support.ok() && (!forced.empty() || FitsDefault(kernel, desc))) return &kernel;
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", kernel.name,
                           support.ok() ? "not chosen for this m or determinism" : support.reason);
  }
  if (reasons.empty()) {
    return Status(Code::kInvalidArgument, fmt::format("kernel: unknown name '{}'", forced));
  }
  return Status(Code::kUnsupported, fmt::format("no kernel for {}: {}", desc.ToString(), reasons));
}

}  // namespace marlin
