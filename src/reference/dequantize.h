// The exact real value of every quantized weight.
#pragma once

#include <cstdint>
#include <vector>

#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin::reference {

/// One matrix W [k, n] in double.
struct DenseWeights {
  int64_t k = 0;
  int64_t n = 0;
  std::vector<double> value;  ///< scale * (value(code) - zero) + bias, [k, n].
  /// |scale| * (|value| + |zero|) + |bias|, [k, n]: equals |value| without zeros and biases. Its
  /// sums bound the error of kernels that add the terms of a weight separately.
  std::vector<double> magnitude;
};

/// Decodes one expert's matrix. Errors: kInvalidArgument when the views are smaller than the spec
/// implies or the expert does not exist.
Result<DenseWeights> Dequantize(const QuantizedWeights& weights, int64_t expert = 0);

}  // namespace marlin::reference
