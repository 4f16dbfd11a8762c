// Stands for the header of the CUDA toolkit: device code and the types of the runtime's interface.
#pragma once

#include "cuda_emulation/device_functions.h"
#include "cuda_emulation/emulate.h"
#include "cuda_emulation/ptx.h"
#include "cuda_emulation/vector_types.h"

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorNotSupported = 801,
};
/// Launches report their findings by themselves (TakeFindings).
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}
