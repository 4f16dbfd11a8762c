#include "backends/cuda/runtime/cuda_status.h"

namespace marlin::cuda {
namespace {

std::string Describe(cudaError_t error) {
  return std::string(cudaGetErrorName(error)) + " (" + cudaGetErrorString(error) + ")";
}

/// Whether an error comes from a bad call: CUDA reports it once, and the device stays usable.
bool IsRefusal(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidValue:
    case cudaErrorInvalidConfiguration:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorNotSupported:
    case cudaErrorCooperativeLaunchTooLarge:
    case cudaErrorLaunchOutOfResources:
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureImplicit:
      return true;
    default:
      return false;
  }
}

}  // namespace

Status ErrorLatch::Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Lost();
  cudaGetLastError();  // Clears a non-sticky error, so that the next call does not report it.
  const std::string message = std::string(what) + ": " + Describe(error);
  if (error == cudaErrorMemoryAllocation) return Status(Code::kOutOfMemory, message);
  if (IsRefusal(error)) return Status(Code::kInternal, message);
  cudaError_t none = cudaSuccess;
  lost_.compare_exchange_strong(none, error);
  return Status(Code::kDeviceLost, message);
}

Status ErrorLatch::Lost() const {
  const cudaError_t error = lost_.load();
  if (error == cudaSuccess) return Status();
  return Status(Code::kDeviceLost, "the device failed before: " + Describe(error));
}

}  // namespace marlin::cuda
