// Checks of arguments that several operations share. Each error names the argument and both sides.
#pragma once

#include <string>
#include <string_view>

#include "base/view_checks.h"
#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/status.h"
#include "marlin/tensor.h"
#include "marlin/weights.h"

namespace marlin {

inline Status Invalid(std::string_view message) { return Status(Code::kInvalidArgument, message); }

/// f32, bf16 or f16.
bool IsActivationType(DType dtype);

Status CheckActivationType(const char* name, DType type);

/// An activation argument of this shape: its type, data, alignment, and rows (all dimensions but
/// the last) that do not overlap, the last dimension contiguous.
Status CheckActivations(const char* name, const TensorView& view, const Shape& expected);

/// What CheckActivations asks of data, alignment and strides, whatever the type and shape.
Status CheckMemory(const char* name, const TensorView& view);

/// A contiguous, aligned vector of `count`, or nothing.
Status CheckVector(const char* name, const TensorView& view, int64_t count, bool f32_only);

/// An activation that is one of the enumeration's.
Status CheckKnown(Activation activation);

/// Weights that were prepared for this device.
Status CheckWeights(const Device& device, const PreparedWeights& weights);

/// A matrix of stacked weights.
Status CheckExpert(const WeightsSpec& spec, int64_t expert);

}  // namespace marlin
