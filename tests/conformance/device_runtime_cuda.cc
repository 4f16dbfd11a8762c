#include <cuda_runtime_api.h>

#include <string>

#include "streams.h"

namespace marlin::conformance {

Result<std::shared_ptr<void>> MakeStream(std::string_view backend) {
  if (backend != "cuda") return std::shared_ptr<void>();
  cudaStream_t stream = nullptr;
  // Not ordered with the default stream: what the backend forgets to wait for shows.
  const cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error != cudaSuccess) {
    return Status(Code::kDeviceLost, std::string("stream: ") + cudaGetErrorString(error));
  }
  return std::shared_ptr<void>(
      stream, [](void* made) { (void)cudaStreamDestroy(static_cast<cudaStream_t>(made)); });
}

}  // namespace marlin::conformance
