// What builds without CUDA have in place of the backend.
#include <string>

#include "backends/cuda/cuda_backend.h"
#include "backends/cuda/kernel_table.h"

namespace marlin::cuda {

int DeviceCount() { return 0; }

std::span<const KernelDesc> CudaKernels() { return {}; }

Result<std::unique_ptr<Backend>> OpenCuda(std::string_view name) {
  return Status(Code::kUnsupported, std::string(name) + ": built without CUDA");
}

}  // namespace marlin::cuda
