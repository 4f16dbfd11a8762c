// Workspace layout of cuBLAS's GEMM.
#pragma once

#include <cstdint>

#include "plan/gemm/gemm_desc.h"

namespace marlin::cuda {

/// Alignment that cuBLAS requires of its workspace; the caller's may be less aligned.
inline constexpr int64_t kCublasAlignment = 256;

/// Byte offsets after the staged activations.
struct CublasWorkspace {
  int64_t sums = 0;  ///< fp32 sums; the dense rows of weights come first, at 0.
  int64_t own = 0;   ///< cuBLAS's own workspace.
  int64_t bytes = 0;

  static CublasWorkspace Of(const GemmDesc& desc);
};

}  // namespace marlin::cuda
