// Shared by kernels that expand tiles to dense rows: loads of fragment blocks from global memory,
// and a transpose across lanes.
#pragma once

#include "backends/cuda/common/fragment_math.cuh"
#include "backends/cuda/layout/tile_layout.h"

namespace marlin::cuda {

/// One lane's words of a fragment block in global memory.
template <int kBits>
MARLIN_DEVICE void ReadWords(const uint8_t* block, int lane, uint32_t (&words)[kBits]) {
  if constexpr (kBits <= 3) {
    const uint2 low = __ldg(reinterpret_cast<const uint2*>(block) + lane);
    words[0] = low.x;
    words[1] = low.y;
    if constexpr (kBits == 3) {
      words[2] = __ldg(reinterpret_cast<const uint32_t*>(block + 256) + lane);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kBits / 4; ++i) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(block) + i * 32 + lane);
      words[4 * i] = v.x;
      words[4 * i + 1] = v.y;
      words[4 * i + 2] = v.z;
      words[4 * i + 3] = v.w;
    }
  }
}

/// Transposes across the four lanes that differ in t: lane t's v[j] becomes lane j's v[t].
MARLIN_DEVICE void TransposeLanes(uint32_t (&v)[4], int t) {
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const uint32_t got = __shfl_xor_sync(~0u, (t & 1) != 0 ? v[j] : v[j + 1], 1);
    ((t & 1) != 0 ? v[j] : v[j + 1]) = got;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t got = __shfl_xor_sync(~0u, (t & 2) != 0 ? v[j] : v[j + 2], 2);
    ((t & 2) != 0 ? v[j] : v[j + 2]) = got;
  }
}

}  // namespace marlin::cuda
