// cuBLAS, loaded at run time where it is installed: nothing links to it, and none of its headers is
// needed. marlin_gemm_cublas runs on it, and it is the baseline of benchmarks.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "marlin/status.h"

namespace marlin::cuda {

/// Whether cuBLAS can be loaded. Searched for once per process, in this order: METAL_MARLIN_CUBLAS
/// (files or folders separated by colons), by name, the CUDA toolkit's usual folders, and the
/// folders of NVIDIA's Python wheels. The library stays loaded.
bool HasCublas();

/// c[m, n] = factor x a[m, k] x b[n, k]^T; a and b bf16 or fp16, c of that type or fp32, sums fp32.
/// Strides count elements.
struct CublasProduct {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  const void* a = nullptr;
  int64_t a_stride = 0;
  const void* b = nullptr;
  int64_t b_stride = 0;
  void* c = nullptr;
  int64_t c_stride = 0;
  float factor = 1;
  bool bf16 = true;
  bool f32_output = false;
};

/// The workspace that PyTorch gives cuBLAS on Hopper.
inline constexpr int64_t kCublasWorkspaceBytes = int64_t{32} << 20;

/// A cuBLAS handle on one device. Thread-safe: a mutex serializes calls.
class Cublas {
 public:
  /// On the calling thread's current device. With `exact_sums`, partial sums are fp32 whatever the
  /// type of c. Errors: kUnsupported where it is not installed, kDeviceLost.
  static Result<std::shared_ptr<const Cublas>> Make(bool exact_sums);
  virtual ~Cublas() = default;

  /// Puts a GEMM on a stream (a cudaStream_t). `workspace` has kCublasWorkspaceBytes in the
  /// device's memory: with its default workspace cuBLAS would allocate, which captures forbid, and
  /// give other bits when streams share it. Errors: kInternal with cuBLAS's status.
  virtual Status Launch(const CublasProduct& product, void* workspace, void* stream) const = 0;
  /// Such as "13.1.0".
  virtual std::string Version() const = 0;
};

}  // namespace marlin::cuda
