// Roofline probes: kernels that measure the device's limits, which GEMMs are compared with.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace marlin::cuda {

/// Reads [data, data + bytes) once by bulk copies, or where the code has none by cp.async, into
/// shared memory, from one persistent CTA per SM with enough copies in flight. `bytes` is a
/// multiple of 16 KiB.
cudaError_t LaunchReadBulk(const void* data, int64_t bytes, int sm_count, cudaStream_t stream);

/// The same by loads of 16 bytes, several in flight per thread. `bytes` is a multiple of 64 KiB.
cudaError_t LaunchReadLoads(const void* data, int64_t bytes, int sm_count, cudaStream_t stream);

/// A kernel that does nothing.
cudaError_t LaunchEmpty(cudaStream_t stream);

}  // namespace marlin::cuda
