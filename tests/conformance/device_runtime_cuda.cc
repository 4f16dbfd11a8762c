#include <cuda_runtime_api.h>

#include <string>

#include "device_runtime.h"

namespace marlin::conformance {
namespace {

Status Lost(const char* what, cudaError_t error) {
  return Status(Code::kDeviceLost, std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace

Result<std::shared_ptr<void>> MakeStream(std::string_view backend) {
  if (backend != "cuda") return std::shared_ptr<void>();
  cudaStream_t stream = nullptr;
  // Not ordered with the default stream, so a missing dependency in the backend becomes visible.
  const cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error != cudaSuccess) return Lost("stream", error);
  return std::shared_ptr<void>(
      stream, [](void* made) { (void)cudaStreamDestroy(static_cast<cudaStream_t>(made)); });
}

Result<bool> FillMemory(std::string_view backend, void* data, int value, int64_t bytes) {
  if (backend != "cuda") return false;
  cudaError_t error = cudaMemset(data, value, static_cast<size_t>(bytes));
  if (error == cudaSuccess) error = cudaStreamSynchronize(nullptr);
  if (error != cudaSuccess) return Lost("fill", error);
  return true;
}

}  // namespace marlin::conformance
