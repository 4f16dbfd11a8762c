#include "backends/cuda/gemm/cublas/cublas_plan.h"

#include "backends/cuda/layout/tile_layout.h"
#include "backends/cuda/libraries/cublas_library.h"
#include "backends/cuda/plan/kernel_family.h"
#include "base/checked.h"

namespace marlin::cuda {
namespace {

/// Larger than any other estimate: the row is selected only by measurement.
double CublasMicroseconds(const GemmDesc& /*desc*/, const DeviceShape& /*device*/) { return 1e12; }

Support CublasAvailable(const DeviceProperties& device) {
  if (device.has_dense_library != nullptr && device.has_dense_library()) return {};
  return {"libcublas.so.13 or .12 is not installed; METAL_MARLIN_CUBLAS may name it"};
}

}  // namespace

const KernelFamily& CublasFamily() {
  static constexpr KernelFamily kFamily = {.microseconds = CublasMicroseconds,
                                           .variants = nullptr,
                                           .can_run_as = nullptr,
                                           .available = CublasAvailable};
  return kFamily;
}

Support SupportsCublas(const GemmDesc& desc, const DeviceProperties& device) {
  if (const Support available = CublasAvailable(device); !available.ok()) return available;
  if (desc.determinism == Determinism::kBatchInvariant) return {"cuBLAS's split-K depends on m"};
  return SupportsTiles(desc);
}

CublasWorkspace CublasWorkspace::Of(const GemmDesc& desc) {
  const int64_t rows =
      RoundUp(desc.n, int64_t{kBlockOutputs}) * RoundUp(desc.k, int64_t{kTileK}) * 2;
  CublasWorkspace workspace;
  workspace.sums = RoundUp(rows, kCublasAlignment);
  workspace.own = workspace.sums + RoundUp(desc.m * desc.n * 4, kCublasAlignment);
  workspace.bytes = workspace.own + kCublasWorkspaceBytes + kCublasAlignment;
  return workspace;
}

}  // namespace marlin::cuda
