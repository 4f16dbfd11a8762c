// The arguments of a toy operation.
#pragma once

#include "marlin/tensor.h"

namespace marlin {

/// out[i] = x[count - 1 - i], f32.
struct ToyReverseCall {
  TensorView x;
  MutableTensorView out;
};

}  // namespace marlin
