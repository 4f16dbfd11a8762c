#include "backends/cuda/runtime/device_cholesky.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "backends/cuda/libraries/cusolver_library.h"
#include "base/macros.h"

namespace marlin::cuda {
namespace {

constexpr int64_t kDouble = sizeof(double);
/// cuSOLVER counts rows in 32 bits.
constexpr int64_t kMostCholeskyRows = 46340;

class DeviceCholesky final : public Cholesky {
 public:
  DeviceCholesky(std::shared_ptr<DeviceHandle> device, std::unique_ptr<const Cusolver> cusolver)
      : device_(std::move(device)), cusolver_(std::move(cusolver)) {}

  Result<bool> Factorize(std::span<double> matrix, int64_t k) const override {
    MARLIN_RETURN_IF_ERROR(CheckRows(k));
    const DeviceScope scope(device_->index);
    MARLIN_ASSIGN_OR_RETURN(const DeviceMemory on_device, Upload(matrix));
    MARLIN_ASSIGN_OR_RETURN(const int64_t count, cusolver_->WorkspaceCount(k));
    MARLIN_ASSIGN_OR_RETURN(const DeviceMemory workspace,
                            DeviceMemory::Allocate(device_, std::max<int64_t>(count, 1) * kDouble));
    MARLIN_ASSIGN_OR_RETURN(const DeviceMemory info, DeviceMemory::Allocate(device_, sizeof(int)));
    MARLIN_RETURN_IF_ERROR(cusolver_->Factorize(Doubles(on_device), k, Doubles(workspace), count,
                                                reinterpret_cast<int*>(info.data())));
    int first = 0;
    MARLIN_RETURN_IF_ERROR(Download(info, &first, sizeof(int)));
    if (first != 0) return false;
    MARLIN_RETURN_IF_ERROR(
        Download(on_device, matrix.data(), static_cast<int64_t>(matrix.size_bytes())));
    return true;
  }

  Status Solve(std::span<const double> factor, int64_t k, std::span<double> b) const override {
    MARLIN_RETURN_IF_ERROR(CheckRows(k));
    if (k == 0 || b.empty()) return {};
    const DeviceScope scope(device_->index);
    MARLIN_ASSIGN_OR_RETURN(const DeviceMemory on_device, Upload(factor));
    MARLIN_ASSIGN_OR_RETURN(const DeviceMemory columns, Upload(b));
    MARLIN_ASSIGN_OR_RETURN(const DeviceMemory info, DeviceMemory::Allocate(device_, sizeof(int)));
    MARLIN_RETURN_IF_ERROR(cusolver_->Solve(Doubles(on_device), k, Doubles(columns),
                                            static_cast<int64_t>(b.size()) / k,
                                            reinterpret_cast<int*>(info.data())));
    int wrong = 0;
    MARLIN_RETURN_IF_ERROR(Download(info, &wrong, sizeof(int)));
    if (wrong != 0) {
      return {Code::kInternal, fmt::format("cusolverDnDpotrs: parameter {} is wrong", -wrong)};
    }
    return Download(columns, b.data(), static_cast<int64_t>(b.size_bytes()));
  }

 private:
  static double* Doubles(const DeviceMemory& memory) {
    return reinterpret_cast<double*>(memory.data());
  }

  static Status CheckRows(int64_t k) {
    if (k <= kMostCholeskyRows) return {};
    return {Code::kUnsupported, fmt::format("cusolver: a matrix of {} rows; supported: up to {}", k,
                                            kMostCholeskyRows)};
  }

  Result<DeviceMemory> Upload(std::span<const double> from) const {
    const auto bytes = static_cast<int64_t>(from.size_bytes());
    MARLIN_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::Allocate(device_, bytes));
    MARLIN_RETURN_IF_ERROR(device_->errors.Check(
        cudaMemcpy(memory.data(), from.data(), from.size_bytes(), cudaMemcpyHostToDevice),
        "cholesky"));
    return memory;
  }

  /// Waits for the work on the default stream.
  Status Download(const DeviceMemory& from, void* to, int64_t bytes) const {
    return device_->errors.Check(
        cudaMemcpy(to, from.data(), static_cast<size_t>(bytes), cudaMemcpyDeviceToHost),
        "cholesky");
  }

  std::shared_ptr<DeviceHandle> device_;
  std::unique_ptr<const Cusolver> cusolver_;
};

}  // namespace

Result<std::unique_ptr<Cholesky>> MakeDeviceCholesky(std::shared_ptr<DeviceHandle> device) {
  const DeviceScope scope(device->index);
  MARLIN_ASSIGN_OR_RETURN(std::unique_ptr<const Cusolver> cusolver, Cusolver::Make());
  return std::unique_ptr<Cholesky>(
      std::make_unique<DeviceCholesky>(std::move(device), std::move(cusolver)));
}

}  // namespace marlin::cuda
