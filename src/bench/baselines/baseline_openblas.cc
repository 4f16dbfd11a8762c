#include "bench/baselines/baseline_openblas.h"

#include <dlfcn.h>

#include <climits>
#include <string>

namespace marlin::bench {
namespace {
constexpr int kRowMajor = 101;
constexpr int kNoTranspose = 111;
constexpr int kTranspose = 112;
}  // namespace

Result<OpenBlas> OpenBlas::Load(int threads) {
  for (const char* name : {"libopenblas.so.0", "libopenblas.so", "libopenblas.dylib"}) {
    void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) continue;
    OpenBlas blas;
    blas.library_ = std::shared_ptr<void>(handle, [](void* library) { dlclose(library); });
    blas.sgemm_ = reinterpret_cast<SgemmFunction>(dlsym(handle, "cblas_sgemm"));
    blas.sbgemm_ = reinterpret_cast<SbgemmFunction>(dlsym(handle, "cblas_sbgemm"));
    if (blas.sgemm_ == nullptr) continue;
    const auto set_threads =
        reinterpret_cast<void (*)(int)>(dlsym(handle, "openblas_set_num_threads"));
    if (set_threads != nullptr) set_threads(threads);
    return blas;
  }
  return Status(Code::kUnsupported, "--against openblas: libopenblas is not installed");
}

Status OpenBlas::CheckSizes(int64_t m, int64_t n, int64_t k) {
  for (const int64_t size : {m, n, k}) {
    if (size > INT_MAX) {
      return Status(Code::kUnsupported, "--against openblas: sizes of at most " +
                                            std::to_string(INT_MAX) + " are supported, got " +
                                            std::to_string(size));
    }
  }
  return Status();
}

void OpenBlas::Sgemm(int64_t m, int64_t n, int64_t k, const float* a, const float* b,
                     float* c) const {
  const int mi = static_cast<int>(m);
  const int ni = static_cast<int>(n);
  const int ki = static_cast<int>(k);
  sgemm_(kRowMajor, kNoTranspose, kTranspose, mi, ni, ki, 1.0f, a, ki, b, ki, 0.0f, c, ni);
}

void OpenBlas::Sbgemm(int64_t m, int64_t n, int64_t k, const uint16_t* a, const uint16_t* b,
                      float* c) const {
  const int mi = static_cast<int>(m);
  const int ni = static_cast<int>(n);
  const int ki = static_cast<int>(k);
  sbgemm_(kRowMajor, kNoTranspose, kTranspose, mi, ni, ki, 1.0f, a, ki, b, ki, 0.0f, c, ni);
}

}  // namespace marlin::bench
