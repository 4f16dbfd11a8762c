// A recipe's choice as options of Quantize.
#pragma once

#include "marlin/quantize.h"
#include "marlin/recipe.h"

namespace marlin {

/// Method, codebook and tensor name are the caller's.
inline QuantizeOptions QuantizeOptionsOf(const FormatChoice& choice) {
  QuantizeOptions options;
  options.format = choice.format;
  options.group_size = choice.group_size;
  options.scale_type = choice.scale_type;
  options.symmetric = choice.symmetric;
  options.fractional_zeros = choice.fractional_zeros;
  options.sparsity = choice.sparsity;
  options.e8m0_rule = choice.e8m0_rule;
  options.input_hadamard = choice.input_hadamard;
  return options;
}

}  // namespace marlin
