// Reading tiles out of shared memory.
#pragma once

#include "backends/cuda/common/async_copy.cuh"
#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// One lane's words of a fragment block in shared memory.
template <int kBits>
MARLIN_DEVICE void LoadWords(uint32_t block, int lane, uint32_t (&words)[kBits]) {
  if constexpr (kBits <= 3) {
    const uint2 low = LoadShared8(block + static_cast<uint32_t>(lane) * 8);
    words[0] = low.x;
    words[1] = low.y;
    if constexpr (kBits == 3) words[2] = LoadShared4(block + 256 + static_cast<uint32_t>(lane) * 4);
  } else {
#pragma unroll
    for (int i = 0; i < kBits / 4; ++i) {
      const uint4 v = LoadShared16(block + static_cast<uint32_t>(i * 512 + lane * 16));
      words[4 * i] = v.x;
      words[4 * i + 1] = v.y;
      words[4 * i + 2] = v.z;
      words[4 * i + 3] = v.w;
    }
  }
}

}  // namespace marlin::cuda
