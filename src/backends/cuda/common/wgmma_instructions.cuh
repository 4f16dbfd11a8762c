// Hopper's wgmma instructions: d[64 x N] = a[64 x K] * b[K x N], added to d where `accumulate` is
// not 0. b is in shared memory as `descriptor` says, sums are fp32. Asynchronous: fence before,
// commit and wait after (warpgroup_products.cuh).
//
// Inline assembly counts its operands, sums first, so every N has numbers of its own: a row below.
#pragma once

#include "backends/cuda/common/fragment_math.cuh"

namespace marlin::cuda {

/// a in registers; K = 16 numbers of 16 bits or 32 of 8. `kTransposed`: rows of b are k, not n.
template <typename T, int kTokens, bool kTransposed = false>
struct WarpgroupProduct;

/// K = 32 numbers of 16 bits, of which a stores two of every four, in registers. `metadata`: lanes
/// 0 and 1 of every four hold, in two bits each, the positions of the numbers of rows g (low half)
/// and g + 8 (high half) of the warp's 16, k = 0..15 and 16..31.
template <typename T, int kTokens>
struct SparseWarpgroupProduct;

/// Attention: d[64 rows x kKeys] = a[64 rows x 16 features] * b[kKeys x 16 features]^T in bf16,
/// both in shared memory; `a` is a's descriptor.
template <int kKeys>
struct ScoreProduct;

/// Attention: d[64 rows x kFeatures] = a[64 rows x 16 keys] * b[16 keys x kFeatures], a in
/// registers.
template <int kFeatures>
using ValueProduct = WarpgroupProduct<Bf16x2, kFeatures, true>;

// clang-format off
#define MARLIN_SUMS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MARLIN_SUMS_16 MARLIN_SUMS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MARLIN_SUMS_32 MARLIN_SUMS_16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MARLIN_SUMS_48 MARLIN_SUMS_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MARLIN_SUMS_64 MARLIN_SUMS_48 \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MARLIN_SUMS_96 MARLIN_SUMS_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MARLIN_SUMS_128 MARLIN_SUMS_96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define MARLIN_D8(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), \
                     "+f"(d[(i) + 4]), "+f"(d[(i) + 5]), "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define MARLIN_D16(i) MARLIN_D8(i), MARLIN_D8((i) + 8)
#define MARLIN_D32(i) MARLIN_D16(i), MARLIN_D16((i) + 16)
#define MARLIN_D64(i) MARLIN_D32(i), MARLIN_D32((i) + 32)
#define MARLIN_OUTPUTS_8 MARLIN_D8(0)
#define MARLIN_OUTPUTS_16 MARLIN_D16(0)
#define MARLIN_OUTPUTS_32 MARLIN_D32(0)
#define MARLIN_OUTPUTS_48 MARLIN_D32(0), MARLIN_D16(32)
#define MARLIN_OUTPUTS_64 MARLIN_D64(0)
#define MARLIN_OUTPUTS_96 MARLIN_D64(0), MARLIN_D32(64)
#define MARLIN_OUTPUTS_128 MARLIN_D64(0), MARLIN_D64(64)

// An instruction; `accumulate` is the number of that operand.
#define MARLIN_WGMMA(name, sums, operands, accumulate, ...)                                     \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #accumulate ", 0;\n"                        \
               "wgmma.mma_async" name " {" MARLIN_SUMS_##sums "}, " operands ";\n}\n"           \
               : MARLIN_OUTPUTS_##sums                                                          \
               : __VA_ARGS__)

#define MARLIN_DENSE(n, sums, a0, a1, a2, a3, b, p, unused, T, transposed, types, order)        \
  template <>                                                                                   \
  struct WarpgroupProduct<T, n, transposed> {                                                   \
    static MARLIN_DEVICE void Run(float (&d)[sums], const uint32_t (&a)[4],                     \
                                  uint64_t descriptor, int accumulate) {                        \
      MARLIN_WGMMA(".sync.aligned.m64n" #n types, sums,                                         \
                   "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", p, 1, 1" order, p,       \
                   "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor),                 \
                   "r"(accumulate));                                                            \
    }                                                                                           \
  };

// Sparsity selector 0: lanes 0 and 1 of every four hold the metadata.
#define MARLIN_SPARSE(n, sums, a0, a1, a2, a3, b, e, p, T, types)                               \
  template <>                                                                                   \
  struct SparseWarpgroupProduct<T, n> {                                                         \
    static MARLIN_DEVICE void Run(float (&d)[sums], const uint32_t (&a)[4], uint32_t metadata,  \
                                  uint64_t descriptor, int accumulate) {                        \
      MARLIN_WGMMA(".sp.sync.aligned.m64n" #n types, sums,                                      \
                   "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", %" #e                    \
                   ", 0, p, 1, 1, 0", p,                                                        \
                   "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor),                 \
                   "r"(metadata), "r"(accumulate));                                             \
    }                                                                                           \
  };

#define MARLIN_SCORES(n, sums, a, b, p, ...)                                                    \
  template <>                                                                                   \
  struct ScoreProduct<n> {                                                                      \
    static MARLIN_DEVICE void Run(float (&d)[sums], uint64_t from, uint64_t descriptor,         \
                                  int accumulate) {                                             \
      MARLIN_WGMMA(".sync.aligned.m64n" #n "k16.f32.bf16.bf16", sums,                           \
                   "%" #a ", %" #b ", p, 1, 1, 0, 0", p, "l"(from), "l"(descriptor),            \
                   "r"(accumulate));                                                            \
    }                                                                                           \
  };

// The operands after the sums, of which each macro names those that its instruction has.
#define MARLIN_N16(use, ...) use(16, 8, 8, 9, 10, 11, 12, 13, 14, __VA_ARGS__)
#define MARLIN_N32(use, ...) use(32, 16, 16, 17, 18, 19, 20, 21, 22, __VA_ARGS__)
#define MARLIN_N64(use, ...) use(64, 32, 32, 33, 34, 35, 36, 37, 38, __VA_ARGS__)
#define MARLIN_N96(use, ...) use(96, 48, 48, 49, 50, 51, 52, 53, 54, __VA_ARGS__)
#define MARLIN_N128(use, ...) use(128, 64, 64, 65, 66, 67, 68, 69, 70, __VA_ARGS__)
#define MARLIN_N192(use, ...) use(192, 96, 96, 97, 98, 99, 100, 101, 102, __VA_ARGS__)
#define MARLIN_N256(use, ...) use(256, 128, 128, 129, 130, 131, 132, 133, 134, __VA_ARGS__)

#define MARLIN_PRODUCTS(width)                                           \
  width(MARLIN_DENSE, Bf16x2, false, "k16.f32.bf16.bf16", ", 0")         \
  width(MARLIN_DENSE, F16x2, false, "k16.f32.f16.f16", ", 0")            \
  width(MARLIN_SPARSE, Bf16x2, "k32.f32.bf16.bf16")                      \
  width(MARLIN_SPARSE, F16x2, "k32.f32.f16.f16")
MARLIN_PRODUCTS(MARLIN_N16)
MARLIN_PRODUCTS(MARLIN_N32)
MARLIN_PRODUCTS(MARLIN_N64)
MARLIN_PRODUCTS(MARLIN_N96)
MARLIN_PRODUCTS(MARLIN_N128)
MARLIN_PRODUCTS(MARLIN_N192)
MARLIN_PRODUCTS(MARLIN_N256)
// 8-bit operands are always K-major.
MARLIN_N64(MARLIN_DENSE, E4M3x4, false, "k32.f32.e4m3.e4m3", "")
MARLIN_N128(MARLIN_DENSE, E4M3x4, false, "k32.f32.e4m3.e4m3", "")
MARLIN_N64(MARLIN_DENSE, Bf16x2, true, "k16.f32.bf16.bf16", ", 1")
MARLIN_N128(MARLIN_DENSE, Bf16x2, true, "k16.f32.bf16.bf16", ", 1")
MARLIN_N256(MARLIN_DENSE, Bf16x2, true, "k16.f32.bf16.bf16", ", 1")
MARLIN_N64(MARLIN_SCORES, 0)
MARLIN_N128(MARLIN_SCORES, 0)
// clang-format on

#undef MARLIN_PRODUCTS
#undef MARLIN_N16
#undef MARLIN_N32
#undef MARLIN_N64
#undef MARLIN_N96
#undef MARLIN_N128
#undef MARLIN_N192
#undef MARLIN_N256
#undef MARLIN_SCORES
#undef MARLIN_SPARSE
#undef MARLIN_DENSE
#undef MARLIN_WGMMA

}  // namespace marlin::cuda
