// Checks of arguments that several operations share. Each error names the argument and both sides.
#pragma once

#include <string>

#include "marlin/device.h"
#include "marlin/status.h"
#include "marlin/tensor.h"
#include "marlin/weights.h"

namespace marlin {

inline Status Invalid(std::string message) {
  return Status(Code::kInvalidArgument, std::move(message));
}

/// f32, bf16 or f16.
bool IsActivationType(DType dtype);

/// An activation argument of this shape: its type, data, alignment, and rows (all dimensions but
/// the last) that do not overlap, the last dimension contiguous.
Status CheckActivations(const char* name, const TensorView& view, const Shape& expected);

/// What CheckActivations asks of data, alignment and strides, whatever the type and shape.
Status CheckMemory(const char* name, const TensorView& view);

/// An output that shares no element with an input; with `or_same` it may be the input itself.
/// Knows views into the same rows (columns of one matrix); other interleaved views count as
/// overlapping. Call it after the checks of both.
Status CheckApart(const char* out_name, const TensorView& out, const char* name,
                  const TensorView& view, bool or_same);

/// A contiguous vector of `count`, or nothing.
Status CheckVector(const char* name, const TensorView& view, int64_t count, bool f32_only);

/// Weights prepared for this device, and an expert of theirs.
Status CheckWeights(const Device& device, const PreparedWeights& weights, int64_t expert);

}  // namespace marlin
