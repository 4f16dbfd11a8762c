// Stands for the library's source: launches on the host fail in no other way.
#include "backends/cuda/runtime/cuda_status.h"

namespace marlin::cuda {

Status ErrorLatch::Check(cudaError_t error, const char* what) {
  return error == cudaSuccess ? Status() : Status(Code::kInternal, what);
}

}  // namespace marlin::cuda
