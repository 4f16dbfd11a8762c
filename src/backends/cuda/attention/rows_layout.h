// Rows of keys and values in shared memory, as the kernels and their plans lay them out.
#pragma once

#include "backends/cuda/layout/device_views.h"

namespace marlin::cuda {

inline constexpr int kWarpKeys = 16;
/// Rows in shared memory are an odd number of 16-byte units apart: no bank conflicts in ldmatrix.
inline constexpr int kRowPadding = 16;
MARLIN_HOST_DEVICE constexpr int SharedRowBytes(int features) { return features * 2 + kRowPadding; }

/// Rows without padding, whose units of 16 bytes are swizzled (swizzled_rows.cuh).
MARLIN_HOST_DEVICE constexpr int SwizzledRowBytes(int features) {
  return (features + 63) / 64 * 128;
}

/// Rows of keys and values in shared memory.
struct CachedRows {
  int key_row;  ///< Bytes from row to row of what is multiplied ...
  int value_row;
  int copied_key_row;  ///< ... and of what is copied, which is the same for bf16.
  int copied_value_row;
  bool widens;

  MARLIN_HOST_DEVICE constexpr CachedRows(int key_dim, int value_dim, bool fp8)
      : key_row(SharedRowBytes(key_dim)),
        value_row(SharedRowBytes(value_dim)),
        copied_key_row(fp8 ? key_dim : key_row),
        copied_value_row(fp8 ? value_dim : value_row),
        widens(fp8) {}
};

}  // namespace marlin::cuda
