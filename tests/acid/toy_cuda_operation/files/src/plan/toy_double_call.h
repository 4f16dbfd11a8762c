// The arguments of a toy operation.
#pragma once

#include "marlin/tensor.h"

namespace marlin {

/// out[i] = 2 x[i], f32.
struct ToyDoubleCall {
  TensorView x;
  MutableTensorView out;
};

}  // namespace marlin
