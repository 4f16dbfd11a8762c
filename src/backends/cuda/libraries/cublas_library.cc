#include "backends/cuda/libraries/cublas_library.h"

#include <utility>

#include "backends/cuda/libraries/installed_library.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

// The used declarations of cublas_api.h and library_types.h; the numbers are part of their ABI.
using Handle = void*;
constexpr const char* kNames[] = {"libcublas.so.13", "libcublas.so.12"};
constexpr int kSuccess = 0;
constexpr int kNoTranspose = 0;
constexpr int kTranspose = 1;
constexpr int kF32 = 0;
constexpr int kF16 = 2;
constexpr int kBf16 = 14;
constexpr int kComputeF32 = 68;
constexpr int kDefaultAlgorithm = -1;
constexpr int kDisallowReducedPrecisionReduction = 16;
using CreateFunction = int (*)(Handle*);
using DestroyFunction = int (*)(Handle);
using VersionFunction = int (*)(Handle, int*);
using SetMathFunction = int (*)(Handle, int);
using SetStreamFunction = int (*)(Handle, void* stream);
using SetWorkspaceFunction = int (*)(Handle, void*, size_t);
using GemmFunction = int (*)(Handle, int transa, int transb, int64_t m, int64_t n, int64_t k,
                             const void* alpha, const void* a, int atype, int64_t lda,
                             const void* b, int btype, int64_t ldb, const void* beta, void* c,
                             int ctype, int64_t ldc, int compute, int algorithm);

Status Check(int code, const char* call) {
  if (code == kSuccess) return Status();
  return Status(Code::kInternal, std::string(call) + ": cuBLAS status " + std::to_string(code));
}

struct Library {
  CreateFunction create = nullptr;
  DestroyFunction destroy = nullptr;
  VersionFunction version = nullptr;
  SetMathFunction set_math = nullptr;
  SetStreamFunction set_stream = nullptr;
  SetWorkspaceFunction set_workspace = nullptr;
  GemmFunction gemm = nullptr;

  /// False when the library lacks a function.
  bool Resolve(void* library) {
    return FindFunction(library, "cublasCreate_v2", &create) &&
           FindFunction(library, "cublasDestroy_v2", &destroy) &&
           FindFunction(library, "cublasGetVersion_v2", &version) &&
           FindFunction(library, "cublasSetMathMode", &set_math) &&
           FindFunction(library, "cublasSetStream_v2", &set_stream) &&
           FindFunction(library, "cublasSetWorkspace_v2", &set_workspace) &&
           FindFunction(library, "cublasGemmEx_64", &gemm);
  }
};

/// Null where cuBLAS is not installed. Never unloaded: handles may live as long as the process.
const Library* Load() {
  static Library library;
  static const bool loaded = OpenInstalled(kNames, "METAL_MARLIN_CUBLAS",
                                           [](void* opened) { return library.Resolve(opened); });
  return loaded ? &library : nullptr;
}

class LoadedCublas final : public Cublas {
 public:
  explicit LoadedCublas(const Library& library) : library_(library) {}
  ~LoadedCublas() override {
    if (handle_ != nullptr) library_.destroy(handle_);
  }
  LoadedCublas(const LoadedCublas&) = delete;
  LoadedCublas& operator=(const LoadedCublas&) = delete;

  Status Start(bool exact_sums) {
    if (library_.create(&handle_) != kSuccess) {
      return Status(Code::kDeviceLost, "cublasCreate: failed on this device");
    }
    return exact_sums ? Check(library_.set_math(handle_, kDisallowReducedPrecisionReduction),
                              "cublasSetMathMode")
                      : Status();
  }

  Status Launch(const CublasProduct& product, void* workspace, void* stream) const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    MARLIN_RETURN_IF_ERROR(Check(library_.set_stream(handle_, stream), "cublasSetStream"));
    // cublasSetStream resets the workspace to the default one.
    MARLIN_RETURN_IF_ERROR(Check(library_.set_workspace(handle_, workspace, kCublasWorkspaceBytes),
                                 "cublasSetWorkspace"));
    const float zero = 0.0f;
    const int type = product.bf16 ? kBf16 : kF16;
    // cuBLAS is column-major: C^T[n, m] = B x A^T.
    return Check(library_.gemm(handle_, kTranspose, kNoTranspose, product.n, product.m, product.k,
                               &product.factor, product.b, type, product.b_stride, product.a, type,
                               product.a_stride, &zero, product.c, product.f32_output ? kF32 : type,
                               product.c_stride, kComputeF32, kDefaultAlgorithm),
                 "cublasGemmEx");
  }

  std::string Version() const override {
    int number = 0;
    if (library_.version(handle_, &number) != kSuccess) return "unknown";
    return std::to_string(number / 10000) + "." + std::to_string(number / 100 % 100) + "." +
           std::to_string(number % 100);
  }

 private:
  const Library& library_;
  Handle handle_ = nullptr;
  mutable std::mutex mutex_;
};

}  // namespace

bool HasCublas() { return Load() != nullptr; }

Result<std::shared_ptr<const Cublas>> Cublas::Make(bool exact_sums) {
  const Library* const library = Load();
  if (library == nullptr) {
    return Status(
        Code::kUnsupported,
        "cublas: libcublas.so.13 or .12 is not installed; METAL_MARLIN_CUBLAS may name it");
  }
  auto made = std::make_shared<LoadedCublas>(*library);
  MARLIN_RETURN_IF_ERROR(made->Start(exact_sums));
  return std::shared_ptr<const Cublas>(std::move(made));
}

}  // namespace marlin::cuda
