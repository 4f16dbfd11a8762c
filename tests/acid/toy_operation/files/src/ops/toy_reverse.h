// A toy operation: a vector the other way round.
#pragma once

#include "marlin/device.h"
#include "marlin/tensor.h"

namespace marlin {

/// out = x from its end to its beginning; contiguous f32 of one length, apart.
Status ToyReverse(const Device& device, const TensorView& x, const MutableTensorView& out,
                  void* stream = nullptr);

}  // namespace marlin
