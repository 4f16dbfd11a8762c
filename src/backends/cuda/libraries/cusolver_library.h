// cuSOLVER, loaded at run time where it is installed: Cholesky factorizations of quantization.
#pragma once

#include <cstdint>
#include <memory>

#include "marlin/status.h"

namespace marlin::cuda {

/// A cuSOLVER handle on one device, for column-major matrices of doubles in its memory. Work goes
/// to the default stream. Thread-safe: a mutex serializes calls.
class Cusolver {
 public:
  /// On the calling thread's current device. Searched for as cuBLAS (installed_library.h), with
  /// METAL_MARLIN_CUSOLVER. Errors: kUnsupported where it is not installed, kDeviceLost.
  static Result<std::unique_ptr<const Cusolver>> Make();
  virtual ~Cusolver() = default;

  /// The doubles of workspace that Factorize of a matrix [k, k] needs.
  virtual Result<int64_t> WorkspaceCount(int64_t k) const = 0;
  /// Replaces the lower triangle of `matrix` by its factor. *info becomes 0, or the number of the
  /// first leading minor that is not positive. Errors: kInternal with cuSOLVER's status.
  virtual Status Factorize(double* matrix, int64_t k, double* workspace, int64_t workspace_count,
                           int* info) const = 0;
  /// Replaces b [k, columns] by (L L^T)^-1 b.
  virtual Status Solve(const double* factor, int64_t k, double* b, int64_t columns,
                       int* info) const = 0;
};

}  // namespace marlin::cuda
