// A toy operation that CUDA has a kernel for: doubles a vector.
#pragma once

#include "marlin/device.h"
#include "marlin/tensor.h"

namespace marlin {

/// out = 2 x; contiguous f32 of equal length, in device memory, not overlapping.
Status ToyDouble(const Device& device, const TensorView& x, const MutableTensorView& out,
                 void* stream = nullptr);

}  // namespace marlin
