// How fast a model reads a prompt and writes, beside the time of its products alone.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "cli/console.h"
#include "marlin/device.h"
#include "marlin/status.h"

namespace marlin::cli {

struct ModelBenchOptions {
  std::string path;
  int64_t prompt_tokens = 512;
  std::string commit;  ///< Named in the document.
};

/// Times prefill and decoding after it. Beside each stands the time of the model's products of the
/// same shapes run one after the other: what `bench gemm` predicts. Errors: those of Model::Open,
/// kInvalidArgument when the prompt does not fit.
Status BenchModel(Console& console, const Device& device, const ModelBenchOptions& options);

}  // namespace marlin::cli
