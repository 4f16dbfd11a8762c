// The Python class TextOptions.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "marlin/generate.h"

namespace marlin::python {

/// marlin::GenerateOptions with a Python callback.
struct TextOptions : SamplingOptions {
  int64_t max_tokens = 128;
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;
  SpeculationOptions speculation;
  nanobind::object callback = nanobind::none();
};

inline GenerateOptions GenerateOptionsOf(const TextOptions& text) {
  GenerateOptions options;
  options.max_tokens = text.max_tokens;
  options.sampling = static_cast<const SamplingOptions&>(text);
  options.stop_token_ids = text.stop_token_ids;
  options.ignore_eos = text.ignore_eos;
  options.speculation = text.speculation;
  return options;
}

}  // namespace marlin::python
