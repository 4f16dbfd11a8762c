// The row marlin_gemm_cublas: weights as dense rows in the workspace, a product by cuBLAS, then the
// epilogue.
//
//   W^T[n, k] (16 bits) <- tiles     C[m, n] = factor x A x W     where the epilogue asks for no
//   more
//                                    sums[m, n] (fp32) = A x W, then the reduce kernel, elsewhere
//
// Weights are rounded as in the other kernels on tiles, sums are fp32 throughout. One algorithm for
// one problem: cuBLAS's own choice, with a workspace of fixed size.
#pragma once

#include <memory>
#include <mutex>
#include <string_view>

#include "backends/cuda/cublas_library.h"
#include "backends/cuda/cuda_status.h"
#include "backends/cuda/launch.h"
#include "plan/backend.h"

namespace marlin::cuda {

inline bool IsCublas(const KernelDesc& kernel) {
  return std::string_view(kernel.name) == "marlin_gemm_cublas";
}

/// Where what lies in the workspace, in bytes behind the staged activations.
struct CublasWorkspace {
  int64_t sums = 0;  ///< The dense rows are first.
  int64_t own = 0;   ///< cuBLAS's.
  int64_t bytes = 0;

  static CublasWorkspace Of(const GemmDesc& desc);
};

/// Thread-safe; its handle is made by the first product.
class CublasGemm {
 public:
  /// On the calling thread's current device. Errors: those of Cublas::Make and Launch, and of the
  /// kernels before and after.
  Status Run(const TileGemm& gemm, const GemmCall& call, uint8_t* workspace,
             ErrorLatch& errors) const;

 private:
  Result<std::shared_ptr<const Cublas>> Handle() const;

  mutable std::mutex mutex_;
  mutable std::shared_ptr<const Cublas> handle_;
};

}  // namespace marlin::cuda
