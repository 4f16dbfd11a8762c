#include "backends/cuda/libraries/cusolver_library.h"

#include <mutex>
#include <string>
#include <utility>

#include "backends/cuda/libraries/installed_library.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

// The used declarations of cusolverDn.h; the numbers are part of their ABI.
using Handle = void*;
constexpr const char* kNames[] = {"libcusolver.so.12", "libcusolver.so.11"};
constexpr int kSuccess = 0;
constexpr int kLower = 0;
using CreateFunction = int (*)(Handle*);
using DestroyFunction = int (*)(Handle);
using WorkspaceFunction = int (*)(Handle, int uplo, int n, double* a, int lda, int* count);
using FactorizeFunction = int (*)(Handle, int uplo, int n, double* a, int lda, double* workspace,
                                  int count, int* info);
using SolveFunction = int (*)(Handle, int uplo, int n, int columns, const double* a, int lda,
                              double* b, int ldb, int* info);

struct Library {
  CreateFunction create = nullptr;
  DestroyFunction destroy = nullptr;
  WorkspaceFunction workspace = nullptr;
  FactorizeFunction factorize = nullptr;
  SolveFunction solve = nullptr;

  /// False when the library lacks a function.
  bool Resolve(void* library) {
    return FindFunction(library, "cusolverDnCreate", &create) &&
           FindFunction(library, "cusolverDnDestroy", &destroy) &&
           FindFunction(library, "cusolverDnDpotrf_bufferSize", &workspace) &&
           FindFunction(library, "cusolverDnDpotrf", &factorize) &&
           FindFunction(library, "cusolverDnDpotrs", &solve);
  }
};

/// Null where cuSOLVER is not installed.
const Library* Load() {
  static Library library;
  static const bool loaded = OpenInstalled(kNames, "METAL_MARLIN_CUSOLVER",
                                           [](void* opened) { return library.Resolve(opened); });
  return loaded ? &library : nullptr;
}

Status Check(int code, const char* call) {
  if (code == kSuccess) return {};
  return {Code::kInternal, std::string(call) + ": cuSOLVER status " + std::to_string(code)};
}

class LoadedCusolver final : public Cusolver {
 public:
  explicit LoadedCusolver(const Library& library) : library_(library) {}
  ~LoadedCusolver() override {
    if (handle_ != nullptr) library_.destroy(handle_);
  }
  LoadedCusolver(const LoadedCusolver&) = delete;
  LoadedCusolver& operator=(const LoadedCusolver&) = delete;

  Status Start() {
    if (library_.create(&handle_) == kSuccess) return {};
    return {Code::kDeviceLost, "cusolverDnCreate: failed on this device"};
  }

  Result<int64_t> WorkspaceCount(int64_t k) const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    int count = 0;
    const auto n = static_cast<int>(k);
    MARLIN_RETURN_IF_ERROR(Check(library_.workspace(handle_, kLower, n, nullptr, n, &count),
                                 "cusolverDnDpotrf_bufferSize"));
    return int64_t{count};
  }

  Status Factorize(double* matrix, int64_t k, double* workspace, int64_t workspace_count,
                   int* info) const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto n = static_cast<int>(k);
    return Check(library_.factorize(handle_, kLower, n, matrix, n, workspace,
                                    static_cast<int>(workspace_count), info),
                 "cusolverDnDpotrf");
  }

  Status Solve(const double* factor, int64_t k, double* b, int64_t columns,
               int* info) const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto n = static_cast<int>(k);
    return Check(
        library_.solve(handle_, kLower, n, static_cast<int>(columns), factor, n, b, n, info),
        "cusolverDnDpotrs");
  }

 private:
  const Library& library_;
  Handle handle_ = nullptr;
  mutable std::mutex mutex_;
};

}  // namespace

Result<std::unique_ptr<const Cusolver>> Cusolver::Make() {
  const Library* const library = Load();
  if (library == nullptr) {
    return Status(
        Code::kUnsupported,
        "cusolver: libcusolver.so.12 or .11 is not installed; METAL_MARLIN_CUSOLVER may name it");
  }
  auto made = std::make_unique<LoadedCusolver>(*library);
  MARLIN_RETURN_IF_ERROR(made->Start());
  return std::unique_ptr<const Cusolver>(std::move(made));
}

}  // namespace marlin::cuda
