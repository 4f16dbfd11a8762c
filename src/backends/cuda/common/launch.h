// Launches of kernels with clusters, programmatic dependent launch and TMA descriptors.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "backends/cuda/layout/device_views.h"

namespace marlin::cuda {

struct LaunchSize {
  dim3 grid;
  int threads = 0;
  int shared_bytes = 0;
  bool overlap_previous = false;  ///< Programmatic dependent launch, where the code has it.
  dim3 cluster = {1, 1, 1};
};

/// The shared memory that a CTA of the current device may have, or METAL_MARLIN_CUDA_SHARED if that
/// is less.
cudaError_t MostShared(int* bytes);

/// Lets a kernel be launched with as much shared memory as a CTA may have. Call it once for each
/// function: other threads may launch it meanwhile.
cudaError_t AllowAllShared(const void* function);

/// Asks for the largest shared memory of a multiprocessor for a kernel, whatever it uses: a
/// multiprocessor drains before it changes the split of shared memory and L1, so all kernels of a
/// chain have the same. Call it once for each function.
cudaError_t PreferShared(const void* function);

/// Launches a kernel on a stream. Precondition: AllowAllShared(function).
cudaError_t Launch(const void* function, const LaunchSize& size, void** parameters,
                   cudaStream_t stream);

/// Prepares kernels of a chain: PreferShared.
template <typename... Kernels>
cudaError_t PrepareKernels(Kernels... kernels) {
  for (const void* const kernel : {reinterpret_cast<const void*>(kernels)...}) {
    const cudaError_t error = PreferShared(kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

/// The same for kernels that may use all shared memory of a CTA.
template <typename... Kernels>
cudaError_t PrepareSharedKernels(Kernels... kernels) {
  for (const void* const kernel : {reinterpret_cast<const void*>(kernels)...}) {
    const cudaError_t error = AllowAllShared(kernel);
    if (error != cudaSuccess) return error;
  }
  return PrepareKernels(kernels...);
}

/// Launches a kernel that begins with EnterChain (chain.cuh).
template <typename... Parameters>
cudaError_t LaunchInChain(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes,
                          cudaStream_t stream, Parameters... parameters) {
  void* pointers[] = {&parameters...};
  const LaunchSize size = {grid, threads, shared_bytes, true};
  return Launch(reinterpret_cast<const void*>(kernel), size, pointers, stream);
}

/// Encodes a TMA descriptor of activations: tiles of 128 bytes x `tokens` rows in the 128-byte
/// swizzle, zeros outside of A. Errors: cudaErrorInvalidValue, or cudaErrorNotSupported where the
/// driver has no cuTensorMapEncodeTiled.
cudaError_t EncodeMap(const ActivationView& a, CUtensorMapDataType type, int element_bytes,
                      int tokens, CUtensorMap* map);

/// Whether `count` adjacent 16-bit outputs can be written with one aligned, vectorized store.
bool StoresAsOne(const EpilogueView& view, int count);

}  // namespace marlin::cuda
