#include "backends/cuda/common/launch.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <limits>
#include <string>

#include "backends/cuda/runtime/device_code.h"
#include "base/environment.h"

namespace marlin::cuda {

namespace {

/// METAL_MARLIN_CUDA_SHARED, in bytes.
int SharedSetting() {
  constexpr int kKiB = 1024;
  int kib = std::numeric_limits<int>::max() / kKiB;
  if (const auto given = ReadEnvironment("METAL_MARLIN_CUDA_SHARED")) {
    const std::string& text = given->value;
    int parsed = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed);
    // Every plan needs what the smallest device has.
    constexpr int kLeastKiB = 99;
    if (error == std::errc() && end == text.data() + text.size()) kib = std::max(parsed, kLeastKiB);
  }
  return std::min(kib, std::numeric_limits<int>::max() / kKiB) * kKiB;
}

}  // namespace

cudaError_t MostShared(int* bytes) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  static const int most = SharedSetting();
  *bytes = std::min(*bytes, most);
  return error;
}

cudaError_t AllowAllShared(const void* function) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, function);
  if (error != cudaSuccess) return error;
  int most = 0;
  if (const cudaError_t queried = MostShared(&most); queried != cudaSuccess) return queried;
  // Static shared memory comes out of the same limit.
  return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              most - static_cast<int>(attributes.sharedSizeBytes));
}

cudaError_t PreferShared(const void* function) {
  return cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

cudaError_t Launch(const void* function, const LaunchSize& size, void** parameters,
                   cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = size.grid;
  config.blockDim = dim3(static_cast<unsigned>(size.threads));
  config.dynamicSmemBytes = static_cast<size_t>(size.shared_bytes);
  config.stream = stream;
  std::array<cudaLaunchAttribute, 2> attributes = {};
  config.attrs = attributes.data();
  // Code of before 9.0 does not wait for the kernel that it would overlap.
  if (size.overlap_previous && DeviceCode() >= 90) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (size.cluster.x * size.cluster.y > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {size.cluster.x, size.cluster.y, 1};
  }
  return cudaLaunchKernelExC(&config, function, parameters);
}

namespace {

/// The driver's function, found at run time so that nothing links to the driver.
using EncodeFunction = decltype(&cuTensorMapEncodeTiled);

EncodeFunction FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  constexpr unsigned kVersion = 12000;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             kVersion, cudaEnableDefault, &result);
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess
             ? reinterpret_cast<EncodeFunction>(function)
             : nullptr;
}

}  // namespace

cudaError_t EncodeMap(const ActivationView& a, CUtensorMapDataType type, int element_bytes,
                      int tokens, CUtensorMap* map) {
  static const EncodeFunction encode = FindEncode();
  if (encode == nullptr) return cudaErrorNotSupported;
  const std::array<cuuint64_t, 2> dims = {static_cast<cuuint64_t>(a.k),
                                          static_cast<cuuint64_t>(a.m)};
  // With one row the stride does not matter, but it must be valid.
  const int64_t columns = a.m > 1 ? a.stride : a.k;
  const std::array<cuuint64_t, 1> strides = {
      static_cast<cuuint64_t>((columns * element_bytes + 15) / 16 * 16)};
  const std::array<cuuint32_t, 2> box = {128U / static_cast<cuuint32_t>(element_bytes),
                                         static_cast<cuuint32_t>(tokens)};
  const std::array<cuuint32_t, 2> steps = {1, 1};
  const CUresult result =
      encode(map, type, 2, const_cast<void*>(a.data), dims.data(), strides.data(), box.data(),
             steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

bool StoresAsOne(const EpilogueView& view, int count) {
  const auto bytes = static_cast<uintptr_t>(count) * sizeof(uint16_t);
  return view.n % count == 0 && view.stride % count == 0 &&
         reinterpret_cast<uintptr_t>(view.out) % bytes == 0;
}

}  // namespace marlin::cuda
