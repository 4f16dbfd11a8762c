// Stand-ins for the backend's entry points in builds without CUDA.
#include <string>

#include "backends/cuda/cuda_backend.h"
#include "backends/cuda/measure/graph_timer.h"

namespace marlin::cuda {
namespace {

Status BuiltWithoutCuda(std::string_view name) {
  return Status(Code::kUnsupported, std::string(name) + ": built without CUDA");
}

}  // namespace

int DeviceCount() { return 0; }

CudaBuild GetCudaBuild() { return {}; }

Result<std::unique_ptr<Backend>> OpenCuda(std::string_view name) { return BuiltWithoutCuda(name); }

Result<std::unique_ptr<GraphTimer>> OpenGraphTimer(std::string_view device) {
  return BuiltWithoutCuda(device);
}

}  // namespace marlin::cuda
