// GEMM times on this machine for several kinds of weights side by side.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "marlin/device.h"
#include "marlin/recipe.h"
#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin::bench {

struct ProductTiming {
  double seconds = 0;  ///< Median.
  std::string kernel;
};

/// Random matrices [k, n] in the format of `choice`, more than the caches hold, so that using them
/// in turn reads them from memory as a large model does. Errors: from Prepare.
Result<PreparedWeights> PrepareRandomWeights(const Device& device, const FormatChoice& choice,
                                             int64_t n, int64_t k);

/// Times C[m, n] = A[m, k] x W[k, n] with bf16 A and C for each of the weights, all of one shape,
/// in turn, so that other load on the machine affects all equally. Errors: from Gemm.
Result<std::vector<ProductTiming>> TimeProducts(const Device& device,
                                                std::span<const PreparedWeights> weights,
                                                int64_t m);

}  // namespace marlin::bench
