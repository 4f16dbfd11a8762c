// What the FP8 kernel is given beside what the warpgroup kernels share.
#pragma once

#include "backends/cuda/kernels/wgmma/wgmma_layout.h"

namespace marlin::cuda {

struct Fp8Arguments {
  WgmmaArguments product;             ///< `splits` is 1.
  const float* row_scales = nullptr;  ///< [m]: what a row's sums are multiplied with.
};

/// Bytes of one slot's activations: rows of 128 e4m3 numbers.
MARLIN_HOST_DEVICE constexpr int Fp8SlotBytes(int tokens) { return tokens * kTileK; }

/// Stored scales, which are below 2^16, are taken times 2^-this; sums are as much too small.
inline constexpr int kFp8Shift = 16;

}  // namespace marlin::cuda
