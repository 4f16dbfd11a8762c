// A toy operation: reverses a vector.
#pragma once

#include "marlin/device.h"
#include "marlin/tensor.h"

namespace marlin {

/// out = x reversed; contiguous f32 of equal length, not overlapping.
Status ToyReverse(const Device& device, const TensorView& x, const MutableTensorView& out,
                  void* stream = nullptr);

}  // namespace marlin
