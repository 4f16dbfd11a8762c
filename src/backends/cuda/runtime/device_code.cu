#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

#include "backends/cuda/runtime/device_code.h"

namespace marlin::cuda {
namespace {

/// Compiled for the same capabilities as all kernels but Hopper's own.
__global__ void Probe() {}

int Query() {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&Probe)) == cudaSuccess) {
    return attributes.ptxVersion;
  }
  cudaGetLastError();
  return 0;
}

}  // namespace

int DeviceCode() {
  constexpr int kMostDevices = 64;
  static std::array<std::atomic<int>, kMostDevices> codes;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMostDevices) return Query();
  std::atomic<int>& code = codes[static_cast<size_t>(device)];
  if (code.load(std::memory_order_relaxed) == 0) code.store(Query(), std::memory_order_relaxed);
  return code.load(std::memory_order_relaxed);
}

namespace {

LacksCode LackOf(cudaError_t error) {
  switch (error) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidKernelImage:
    case cudaErrorInvalidDeviceFunction:
      return LacksCode::kIsNotBuilt;
    case cudaErrorUnsupportedPtxVersion:
      return LacksCode::kNeedsDriver;
    case cudaErrorMemoryAllocation:
      return LacksCode::kNeedsMemory;
    default:
      return LacksCode::kFails;
  }
}

}  // namespace

NoCode WhyNoCode() {
  cudaFuncAttributes attributes;
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&Probe));
  cudaGetLastError();
  return {cudaGetErrorString(error), LackOf(error)};
}

const char* BuiltCodes() { return MARLIN_CUDA_CODES; }

}  // namespace marlin::cuda
