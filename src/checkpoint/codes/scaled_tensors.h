// Tensors of an opened checkpoint, multiplied with powers of two.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/aligned_buffer.h"
#include "checkpoint/checkpoint_impl.h"
#include "marlin/checkpoint.h"

namespace marlin {

/// Exponents of the powers of two that a tensor's elements are multiplied with. Empty: none.
struct TensorExponents {
  /// One per output of a matrix; in a stack of experts one per expert and output. Of a vector, one
  /// per element.
  std::vector<int8_t> out;
  /// One per input of a matrix; in a stack of experts one per expert and input.
  std::vector<int8_t> in;
  /// A vector whose elements are stored minus 1: what is multiplied is 1 + the element.
  bool one_plus = false;
};

/// By tensor name.
using ExponentsByTensor = std::map<std::string, TensorExponents>;

/// The type of a tensor's multiplied elements: its own, but f32 for one_plus, since 16 bits that
/// hold an element do not hold a product minus 1.
DType ScaledDType(DType dtype, const TensorExponents& exponents);

/// A tensor's elements, multiplied: in ScaledDType and the tensor's layout. Products keep every
/// bit, unless they leave the type's range: beyond it they are Inf, and below it rounded; one_plus:
/// they are rounded to f32. Errors: kOutOfMemory.
Result<AlignedBuffer> ScaledTensor(const Checkpoint::Impl& source, size_t tensor,
                                   const TensorExponents& exponents);

/// From here on a checkpoint that no view was taken of, and copies of it, have the multiplied
/// tensors. They are computed when asked for. Precondition: all names exist, sizes match.
void ScaleTensors(const ExponentsByTensor& exponents, Checkpoint* checkpoint);

}  // namespace marlin
