// The workspace of a GEMM by cuBLAS.
#pragma once

#include <cstdint>

#include "plan/gemm_desc.h"

namespace marlin::cuda {

/// The alignment that cuBLAS wants of its workspace; a caller's may be aligned to less.
inline constexpr int64_t kCublasAlignment = 256;

/// Offsets in bytes behind the staged activations.
struct CublasWorkspace {
  int64_t sums = 0;  ///< Of fp32 sums; the weights as dense rows come first.
  int64_t own = 0;   ///< Of cuBLAS's own workspace.
  int64_t bytes = 0;

  static CublasWorkspace Of(const GemmDesc& desc);
};

}  // namespace marlin::cuda
