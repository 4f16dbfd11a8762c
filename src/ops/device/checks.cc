#include "ops/device/checks.h"

#include <fmt/core.h>

#include <utility>

#include "base/aligned_buffer.h"
#include "base/fixed_vector.h"
#include "base/macros.h"
#include "ops/device/device.h"

namespace marlin {
namespace {

/// Checks that rows (along the last dimension) do not overlap, however the other dimensions nest.
Status CheckStrides(const char* name, const TensorView& view) {
  const int last = view.rank() - 1;
  if (last < 0) return {};
  if (view.dim(last) > 1 && view.stride(last) != 1) {
    return Invalid(
        fmt::format("{}: columns must be contiguous, got stride {}", name, view.stride(last)));
  }
  // The outer dimensions by ascending stride.
  FixedVector<int, kMaxRank> outer;
  for (int i = 0; i < last; ++i) {
    if (view.dim(i) <= 1) continue;
    outer.push_back(i);
    for (size_t at = outer.size() - 1;
         at > 0 && view.stride(outer[at]) < view.stride(outer[at - 1]); --at) {
      std::swap(outer[at], outer[at - 1]);
    }
  }
  int64_t extent = view.dim(last);
  for (const int i : outer) {
    if (view.stride(i) < extent) {
      return Invalid(fmt::format("{}: {} stride {} is smaller than the {} {}", name,
                                 view.rank() == 2 ? "row" : "outer", view.stride(i), extent,
                                 view.rank() == 2 ? "columns" : "elements inside it"));
    }
    extent += (view.dim(i) - 1) * view.stride(i);
  }
  return {};
}

}  // namespace

Status CheckActivationType(const char* name, DType type) {
  if (IsFloat(type)) return {};
  return Invalid(fmt::format("{}: expected f32, bf16 or f16, got {}", name, DTypeName(type)));
}

Status CheckActivations(const char* name, const TensorView& view, const Shape& expected) {
  MARLIN_RETURN_IF_ERROR(CheckActivationType(name, view.dtype()));
  if (!(view.shape() == expected)) {
    return Invalid(
        fmt::format("{}: expected {}, got {}", name, expected.ToString(), view.shape().ToString()));
  }
  return CheckMemory(name, view);
}

Status CheckMemory(const char* name, const TensorView& view) {
  MARLIN_RETURN_IF_ERROR(CheckData(name, view));
  for (int i = 0; i < view.rank(); ++i) {
    if (view.dim(i) == 0) return {};
  }
  return CheckStrides(name, view);
}

Status CheckVector(const char* name, const TensorView& view, int64_t count, bool f32_only) {
  if (view.empty()) return {};
  if (f32_only ? view.dtype() != DType::kF32 : !IsFloat(view.dtype())) {
    return Invalid(fmt::format("{}: expected {}, got {}", name,
                               f32_only ? "f32" : "f32, bf16 or f16", DTypeName(view.dtype())));
  }
  if (view.rank() != 1 || view.dim(0) != count) {
    return Invalid(fmt::format("{}: expected [{}], got {}", name, count, view.shape().ToString()));
  }
  if (!view.IsContiguous()) return Invalid(fmt::format("{}: must be contiguous", name));
  return CheckData(name, view);
}

Status CheckKnown(Activation activation) {
  if (activation <= Activation::kRelu) return {};
  return Invalid(fmt::format("activation: unknown number {}", static_cast<int>(activation)));
}

Status CheckKnown(Accuracy accuracy) {
  if (accuracy <= Accuracy::kW4A8) return {};
  return Invalid(fmt::format("accuracy: unknown number {}", static_cast<int>(accuracy)));
}

Status CheckKnown(Determinism determinism) {
  if (determinism <= Determinism::kBatchInvariant) return {};
  return Invalid(fmt::format("determinism: unknown number {}", static_cast<int>(determinism)));
}

Status CheckSameType(const char* name, DType planned, DType given) {
  if (planned == given) return {};
  return Invalid(fmt::format("{}: expected {}, which the plan is for, got {}", name,
                             DTypeName(planned), DTypeName(given)));
}

Status CheckWorkspace(const GivenWorkspace& given, int64_t bytes, const char* name,
                      const TensorView& input, const MutableTensorView& out) {
  if (given.bytes < bytes) {
    return Invalid(
        fmt::format("workspace: expected at least {} bytes, got {}", bytes, given.bytes));
  }
  constexpr auto kAlignment = static_cast<uintptr_t>(kBufferAlignment);
  if (const auto past = reinterpret_cast<uintptr_t>(given.data) % kAlignment; past != 0) {
    return Invalid(fmt::format(
        "workspace: must be aligned to {} bytes, got an address {} bytes past", kAlignment, past));
  }
  const TensorView workspace(given.data, DType::kU8, {bytes});
  MARLIN_RETURN_IF_ERROR(CheckNoOverlap("out", out, "the workspace", workspace, false));
  return CheckNoOverlap(name, input, "the workspace", workspace, false);
}

Status CheckWeights(const Device& device, const PreparedWeights& weights) {
  if (!weights.valid()) return Invalid("weights: not prepared");
  if (Internals::Storage(weights)->backend != &Internals::Impl(device).backend()) {
    return Invalid("weights: prepared for another device");
  }
  return {};
}

Status CheckExpert(const WeightsSpec& spec, int64_t expert) {
  if (expert >= 0 && expert < spec.experts) return {};
  return Invalid(fmt::format("expert: expected 0..{}, got {}", spec.experts - 1, expert));
}

}  // namespace marlin
