// Argument checks shared by several operations. Each error names the argument and both values.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/errors.h"
#include "base/view_checks.h"
#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/status.h"
#include "marlin/tensor.h"
#include "marlin/weights.h"

namespace marlin {

Status CheckActivationType(const char* name, DType type);

/// Checks an activation argument against a shape: its type, data, alignment, and that rows (all
/// dimensions but the last) do not overlap; the last dimension must be contiguous.
Status CheckActivations(const char* name, const TensorView& view, const Shape& expected);

/// The checks of CheckActivations on data, alignment and strides, for any type and shape.
Status CheckMemory(const char* name, const TensorView& view);

/// Checks for a contiguous, aligned vector of `count`, or an empty view.
Status CheckVector(const char* name, const TensorView& view, int64_t count, bool f32_only);

/// The bytes from a view's first element to its last. Precondition: no stride is negative.
struct ByteRange {
  uintptr_t begin = 0;
  uintptr_t end = 0;

  explicit ByteRange(const TensorView& view)
      : begin(reinterpret_cast<uintptr_t>(view.data())), end(begin) {
    if (view.empty()) return;
    int64_t last = 0;
    for (int i = 0; i < view.rank(); ++i) {
      if (view.dim(i) == 0) return;
      last += (view.dim(i) - 1) * view.stride(i);
    }
    end += static_cast<uintptr_t>((last + 1) * DTypeBytes(view.dtype()));
  }
  bool Overlaps(const ByteRange& other) const { return begin < other.end && other.begin < end; }
};

/// Checks that a value is a declared enumerator.
Status CheckKnown(Activation activation);
Status CheckKnown(Accuracy accuracy);
Status CheckKnown(Determinism determinism);

/// Checks an operand's type against the one that a plan is for.
Status CheckSameType(const char* name, DType planned, DType given);

/// A caller's workspace.
struct GivenWorkspace {
  void* data;
  int64_t bytes;
};
/// Checks size, alignment and that neither the input `name` nor `out` overlaps the workspace.
Status CheckWorkspace(const GivenWorkspace& given, int64_t bytes, const char* name,
                      const TensorView& input, const MutableTensorView& out);

/// Checks that weights were prepared for this device.
Status CheckWeights(const Device& device, const PreparedWeights& weights);

/// Checks the index of an expert.
Status CheckExpert(const WeightsSpec& spec, int64_t expert);

}  // namespace marlin
