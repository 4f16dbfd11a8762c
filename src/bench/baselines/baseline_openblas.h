// OpenBLAS as a baseline of benchmarks, loaded at run time when it is installed.
#pragma once

#include <cstdint>
#include <memory>

#include "marlin/status.h"

namespace marlin::bench {

class OpenBlas {
 public:
  /// Loads libopenblas and sets its number of threads. Errors: kUnsupported when it is not there.
  static Result<OpenBlas> Load(int threads);
  /// Errors: kUnsupported for a size beyond the 32-bit sizes of the library's interface.
  static Status CheckSizes(int64_t m, int64_t n, int64_t k);

  /// c[m, n] = a[m, k] x b[n, k]^T in fp32.
  void Sgemm(int64_t m, int64_t n, int64_t k, const float* a, const float* b, float* c) const;
  /// The same with bf16 inputs.
  void Sbgemm(int64_t m, int64_t n, int64_t k, const uint16_t* a, const uint16_t* b,
              float* c) const;
  bool has_bf16() const { return sbgemm_ != nullptr; }

 private:
  using SgemmFunction = void (*)(int, int, int, int, int, int, float, const float*, int,
                                 const float*, int, float, float*, int);
  using SbgemmFunction = void (*)(int, int, int, int, int, int, float, const uint16_t*, int,
                                  const uint16_t*, int, float, float*, int);
  std::shared_ptr<void> library_;
  SgemmFunction sgemm_ = nullptr;
  SbgemmFunction sbgemm_ = nullptr;
};

}  // namespace marlin::bench
