#include "bench/baselines/baseline_cublas.h"

#include <utility>

#include "backends/cuda/libraries/cublas_library.h"
#include "base/macros.h"

namespace marlin::bench {

Result<CublasBaseline> LoadCublas(const Device& device) {
  MARLIN_ASSIGN_OR_RETURN(const std::shared_ptr<const cuda::Cublas> cublas,
                          cuda::Cublas::Make(false));
  MARLIN_ASSIGN_OR_RETURN(DeviceBuffer buffer,
                          DeviceBuffer::Allocate(device, cuda::kCublasWorkspaceBytes));
  const auto workspace = std::make_shared<const DeviceBuffer>(std::move(buffer));
  return CublasBaseline{{"cublas_bf16",
                         [cublas, workspace](const DenseProduct& product, void* stream) {
                           return cublas->Launch({.m = product.m,
                                                  .n = product.n,
                                                  .k = product.k,
                                                  .a = product.a,
                                                  .a_stride = product.k,
                                                  .b = product.b,
                                                  .b_stride = product.k,
                                                  .c = product.c,
                                                  .c_stride = product.n},
                                                 workspace->data(), stream);
                         }},
                        cublas->Version()};
}

}  // namespace marlin::bench
