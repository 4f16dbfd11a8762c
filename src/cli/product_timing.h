// How long a product takes on this machine.
#pragma once

#include <cstdint>
#include <string>

#include "marlin/device.h"
#include "marlin/recipe.h"
#include "marlin/status.h"

namespace marlin::cli {

struct ProductTiming {
  double seconds = 0;  ///< Median over the repetitions.
  std::string kernel;
  double Gflops(int64_t m, int64_t n, int64_t k) const;
};

/// Times C[m, n] = A[m, k] x W[k, n] with bf16 A and C and random weights in the format of
/// `choice`. The weights of consecutive calls differ, so that they come from memory as in a model
/// larger than the caches. Takes about a third of a second. Errors: those of Quantize and Gemm.
Result<ProductTiming> TimeProduct(const Device& device, const FormatChoice& choice, int64_t m,
                                  int64_t n, int64_t k);

}  // namespace marlin::cli
