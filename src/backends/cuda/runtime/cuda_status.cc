#include "backends/cuda/runtime/cuda_status.h"

namespace marlin::cuda {
namespace {

std::string Describe(cudaError_t error) {
  return std::string(cudaGetErrorName(error)) + " (" + cudaGetErrorString(error) + ")";
}

/// Errors that CUDA reports for a bad call and then forgets.
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
  cudaGetLastError();  // Forgets what is not kept, so that the next call does not see it.
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
