#include "cli/peer_cublas.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <glob.h>

#include <cstdlib>
#include <sstream>
#include <utility>
#include <vector>

#include "base/macros.h"

namespace marlin::cli {
namespace {

// What of cublas_api.h and library_types.h is used; the numbers are part of their ABI.
using Handle = void*;
constexpr int kSuccess = 0;
constexpr int kNoTranspose = 0;
constexpr int kTranspose = 1;
constexpr int kBf16 = 14;
constexpr int kComputeF32 = 68;
constexpr int kDefaultAlgorithm = -1;
using CreateFunction = int (*)(Handle*);
using DestroyFunction = int (*)(Handle);
using VersionFunction = int (*)(Handle, int*);
using SetStreamFunction = int (*)(Handle, void* stream);
using SetWorkspaceFunction = int (*)(Handle, void*, size_t);
using GemmFunction = int (*)(Handle, int transa, int transb, int m, int n, int k, const void* alpha,
                             const void* a, int atype, int lda, const void* b, int btype, int ldb,
                             const void* beta, void* c, int ctype, int ldc, int compute,
                             int algorithm);

/// What PyTorch gives cuBLAS on Hopper.
constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;

Status Check(int code, const char* call) {
  if (code == kSuccess) return Status();
  return Status(Code::kDeviceLost, fmt::format("{}: cuBLAS status {}", call, code));
}

std::vector<std::string> Glob(const std::string& pattern) {
  std::vector<std::string> paths;
  glob_t found{};
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0) {
    paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  }
  globfree(&found);
  return paths;
}

/// Names and paths to try, in order.
std::vector<std::string> Candidates() {
  constexpr const char* kNames[] = {"libcublas.so.13", "libcublas.so.12"};
  std::vector<std::string> candidates;
  const auto add_folders = [&](const std::string& pattern) {
    for (const char* name : kNames) {
      for (std::string& path : Glob(pattern + "/" + name)) candidates.push_back(std::move(path));
    }
  };
  if (const char* given = std::getenv("MARLIN_CUBLAS"); given != nullptr) {
    std::istringstream paths(given);
    for (std::string path; std::getline(paths, path, ':');) {
      if (path.empty()) continue;
      add_folders(path);
      candidates.push_back(path);
    }
  }
  candidates.insert(candidates.end(), std::begin(kNames), std::end(kNames));
  add_folders("/usr/local/cuda*/lib64");
  std::vector<std::string> environments = {"/opt/*/.venv", "/opt/*", "/usr/local", "/usr"};
  if (const char* active = std::getenv("VIRTUAL_ENV"); active != nullptr) {
    environments.insert(environments.begin(), active);
  }
  for (const std::string& environment : environments) {
    add_folders(environment + "/lib/python3*/*-packages/nvidia/*/lib");
  }
  return candidates;
}

class Cublas {
 public:
  /// False when the library lacks a function.
  bool Resolve(void* library) {
    library_ = std::shared_ptr<void>(library, [](void* loaded) { dlclose(loaded); });
    const auto find = [&](auto& function, const char* name) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      return function != nullptr;
    };
    return find(create_, "cublasCreate_v2") && find(destroy_, "cublasDestroy_v2") &&
           find(version_, "cublasGetVersion_v2") && find(set_stream_, "cublasSetStream_v2") &&
           find(set_workspace_, "cublasSetWorkspace_v2") && find(gemm_, "cublasGemmEx");
  }

  Status Start(const Device& device) {
    Handle handle = nullptr;
    MARLIN_RETURN_IF_ERROR(Check(create_(&handle), "cublasCreate"));
    handle_ = std::shared_ptr<void>(
        handle, [destroy = destroy_, library = library_](void* made) { destroy(made); });
    MARLIN_ASSIGN_OR_RETURN(workspace_, DeviceBuffer::Allocate(device, kWorkspaceBytes));
    return Status();
  }

  Status Launch(const DenseProduct& product, void* stream) const {
    // A new stream takes the workspace away, and without one cuBLAS allocates, which a capture
    // forbids.
    MARLIN_RETURN_IF_ERROR(Check(set_stream_(handle_.get(), stream), "cublasSetStream"));
    MARLIN_RETURN_IF_ERROR(Check(set_workspace_(handle_.get(), workspace_.data(), kWorkspaceBytes),
                                 "cublasSetWorkspace"));
    const float one = 1.0f;
    const float zero = 0.0f;
    const int m = static_cast<int>(product.m);
    const int n = static_cast<int>(product.n);
    const int k = static_cast<int>(product.k);
    // cuBLAS counts columns first: C^T[n, m] = B x A^T.
    return Check(
        gemm_(handle_.get(), kTranspose, kNoTranspose, n, m, k, &one, product.b, kBf16, k,
              product.a, kBf16, k, &zero, product.c, kBf16, n, kComputeF32, kDefaultAlgorithm),
        "cublasGemmEx");
  }

  std::string Version() const {
    int number = 0;
    if (version_(handle_.get(), &number) != kSuccess) return "unknown";
    return fmt::format("{}.{}.{}", number / 10000, number / 100 % 100, number % 100);
  }

 private:
  std::shared_ptr<void> library_;
  std::shared_ptr<void> handle_;
  DeviceBuffer workspace_;
  CreateFunction create_ = nullptr;
  DestroyFunction destroy_ = nullptr;
  VersionFunction version_ = nullptr;
  SetStreamFunction set_stream_ = nullptr;
  SetWorkspaceFunction set_workspace_ = nullptr;
  GemmFunction gemm_ = nullptr;
};

}  // namespace

Result<CublasPeer> LoadCublas(const Device& device) {
  for (const std::string& candidate : Candidates()) {
    void* const library = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) continue;
    const auto cublas = std::make_shared<Cublas>();
    if (!cublas->Resolve(library)) continue;
    MARLIN_RETURN_IF_ERROR(cublas->Start(device));
    return CublasPeer{
        {"cublas_bf16", [cublas](const DenseProduct& product,
                                 void* stream) { return cublas->Launch(product, stream); }},
        cublas->Version()};
  }
  return Status(Code::kUnsupported,
                "cublas: libcublas.so.13 or .12 is not installed; MARLIN_CUBLAS may name it");
}

}  // namespace marlin::cli
