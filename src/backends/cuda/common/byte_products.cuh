// Warp-level MMA instructions of bytes.
#pragma once

#include <cstdint>

#include "backends/cuda/common/fragment_math.cuh"

namespace marlin::cuda {

/// c += a b, m16n8k32 of bytes, unsigned in a and signed in b, in 32-bit integers.
MARLIN_DEVICE void MultiplyAddBytes(uint32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// The same, m16n8k16.
MARLIN_DEVICE void MultiplyAddBytes(uint32_t (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

}  // namespace marlin::cuda
