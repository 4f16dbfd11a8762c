// Stands for the library's header: launches run on the host (TakeFindings).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "backends/cuda/layout/device_views.h"

namespace marlin::cuda {

struct LaunchSize {
  dim3 grid;
  int threads = 0;
  int shared_bytes = 0;
  bool overlap_previous = false;
  dim3 cluster = {1, 1, 1};
};

inline cudaError_t AllowAllShared(const void*) { return cudaSuccess; }
inline cudaError_t PreferShared(const void*) { return cudaSuccess; }
template <typename... Kernels>
cudaError_t PrepareKernels(Kernels...) {
  return cudaSuccess;
}
template <typename... Kernels>
cudaError_t PrepareSharedKernels(Kernels...) {
  return cudaSuccess;
}

inline cudaError_t Launch(const void* function, const LaunchSize& size, void** parameters,
                          cudaStream_t) {
  cuda_emulation::Findings() += cuda_emulation::EmulateUntyped(
      function, {size.grid, dim3(static_cast<unsigned>(size.threads)), size.shared_bytes},
      parameters);
  return cudaSuccess;
}

template <typename... Parameters>
cudaError_t LaunchInChain(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes,
                          cudaStream_t, std::type_identity_t<Parameters>... parameters) {
  cuda_emulation::OnGrid(kernel, grid, dim3(static_cast<unsigned>(threads)),
                         static_cast<size_t>(shared_bytes))(parameters...);
  return cudaSuccess;
}

}  // namespace marlin::cuda
