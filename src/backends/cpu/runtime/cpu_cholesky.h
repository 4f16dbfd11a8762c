// Cholesky factorizations by the instructions of a level.
#pragma once

#include "base/host_cholesky.h"
#include "plan/gemm/kernel_desc.h"

namespace marlin::cpu {

namespace avx2 {
extern const CholeskyFunctions kCholesky;
}  // namespace avx2

inline const CholeskyFunctions& CholeskyOf(Isa level) {
#if defined(__x86_64__)
  if (level != Isa::kScalar) return avx2::kCholesky;
#endif
  return kPortableCholesky;
}

}  // namespace marlin::cpu
