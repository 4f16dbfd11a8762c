// Quantized weights from the arrays of any framework.
#pragma once

#include <string>
#include <vector>

#include "core.h"
#include "marlin/weights.h"

namespace marlin::python {

/// Arguments of QuantizedWeights.from_parts. Sizes of -1 and types of "" are taken from the arrays.
struct WeightsParts {
  std::string format = "fp4_e2m1";
  int64_t k = -1;
  int64_t n = -1;
  int64_t experts = -1;
  int64_t group_size = 128;
  std::string scale_type;
  std::string zero_type;
  nb::object codes = nb::none();
  nb::object scales = nb::none();
  nb::object zeros = nb::none();
  nb::object biases = nb::none();
  nb::object global_scale = nb::none();
  bool global_scale_divides = false;
  nb::object metadata = nb::none();
  nb::object permutation = nb::none();
  nb::object input_scale = nb::none();
  int64_t input_hadamard = 0;
  int64_t super_group_size = 0;
  nb::object super_scales = nb::none();
  nb::object super_biases = nb::none();
  std::vector<float> codebook;
};

/// The names that errors of a caller use for its arguments.
struct PartsCaller {
  std::string codes = "codes";
  std::vector<int64_t> x_shape;  ///< The input of a product, whose last dimension is k; or empty.
};

/// Copies and validates the parts. Throws StatusError that names the caller's argument.
QuantizedWeights MakeWeights(const WeightsParts& parts, const PartsCaller& caller);

void BindWeightsParts(nb::module_& module);

}  // namespace marlin::python
