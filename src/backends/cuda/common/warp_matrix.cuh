// Warp-level MMA instructions and the ldmatrix, stmatrix and movmatrix around them.
#pragma once

#include <cstdint>

#include "backends/cuda/common/fragment_math.cuh"

namespace marlin::cuda {

/// Loads four 8 x 8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix
/// l / 8.
MARLIN_DEVICE void LoadMatrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

/// The same, each matrix transposed.
MARLIN_DEVICE void LoadMatricesTransposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

/// Transposes an 8 x 8 matrix of 16-bit numbers: lane 4 g + t gives {row g, columns 2 t and
/// 2 t + 1} and gets {column g, rows 2 t and 2 t + 1}.
MARLIN_DEVICE uint32_t TurnMatrix(uint32_t pair) {
  uint32_t turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

/// Stores four 8 x 8 matrices of 16-bit numbers in the fragment layout of LoadMatrices and MMA;
/// lane l gives the address of row l % 8 of matrix l / 8.
MARLIN_DEVICE void StoreMatrices(uint32_t address, const uint32_t (&r)[4]) {
  if constexpr (kHasTma) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
  } else {
    int lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t row = __shfl_sync(~0u, address, i * 8 + lane / 4);
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(row + lane % 4 * 4), "r"(r[i]) : "memory");
    }
  }
}

/// The same, transposed: lane l gives the address of column l % 8 of matrix l / 8.
MARLIN_DEVICE void StoreTurned(uint32_t address, const uint32_t (&r)[4]) {
  if constexpr (kHasTma) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
  } else {
    const uint32_t turned[4] = {TurnMatrix(r[0]), TurnMatrix(r[1]), TurnMatrix(r[2]),
                                TurnMatrix(r[3])};
    StoreMatrices(address, turned);
  }
}

/// c += a b, m16n8k16 in fp32.
template <typename T>
MARLIN_DEVICE void MultiplyAdd(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (T::kIsBf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// c += a b, m16n8k32 in fp32 with 2:4 sparsity of a. `kSelector`: lanes 2 kSelector and the next
/// of every four give the metadata.
template <typename T, int kSelector>
MARLIN_DEVICE void SparseMultiplyAdd(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[4],
                                     uint32_t metadata) {
  if constexpr (T::kIsBf16) {
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]),
          "r"(metadata), "n"(kSelector));
  } else {
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]),
          "r"(metadata), "n"(kSelector));
  }
}

/// Rounds to tf32, 11 significant bits with the range of fp32.
MARLIN_DEVICE float RoundTf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

/// c += a b, m16n8k8 of tf32 in fp32.
MARLIN_DEVICE void MultiplyAddTf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                   uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace marlin::cuda
