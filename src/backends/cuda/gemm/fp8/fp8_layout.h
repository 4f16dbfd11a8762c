// Parameters of the FP8 kernel: the WGMMA kernel's, and the scales of the rows.
#pragma once

#include "backends/cuda/gemm/wgmma/wgmma_layout.h"

namespace marlin::cuda {

struct Fp8Arguments {
  WgmmaArguments product;             ///< `splits` is 1.
  const float* row_scales = nullptr;  ///< [m]: multipliers of the rows' sums.
};

/// Bytes of one stage's activations: rows of 128 e4m3 numbers.
MARLIN_HOST_DEVICE constexpr int Fp8SlotBytes(int tokens) { return tokens * kTileK; }

/// Stored scales, which are below 2^16, are multiplied by 2^-this; the epilogue's multiplier
/// compensates.
inline constexpr int kFp8Shift = 16;

/// The FP8 kernels (plan/instances.def); their parameters are a CUtensorMap and an Fp8Arguments.
struct Fp8Kernels {
  struct Variant {
    int tokens;      ///< tile_m: 64, 128 or 256.
    bool one_group;  ///< Per tile.
  };
  template <typename Tiles>
  static const void* Function(const Variant& variant);
};

}  // namespace marlin::cuda
