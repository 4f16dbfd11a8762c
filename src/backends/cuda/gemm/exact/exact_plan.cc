// The exact kernels have one tiling, which exact_layout.h computes.
#include "backends/cuda/plan/kernel_family.h"

namespace marlin::cuda {
namespace {

/// The exact kernels are slower than the tensor-core kernels wherever those support the problem
/// (docs/kernels/exact.md): the estimate only has to lose.
double ExactMicroseconds(const GemmDesc& /*desc*/, const DeviceShape& /*device*/) { return 1e12; }

}  // namespace

const KernelFamily& ExactFamily() {
  static constexpr KernelFamily kFamily = {ExactMicroseconds, nullptr, nullptr, true};
  return kFamily;
}

Support SupportsExact(const GemmDesc& desc, const DeviceProperties& /*device*/) {
  constexpr int64_t kMaxColumns = 65535 * 32;
  if (desc.accuracy == Accuracy::kW4A8) return {"does not quantize activations"};
  if (desc.weights.marlin_w4) return {"does not read the marlin_w4 layout"};
  if (desc.n > kMaxColumns) return {"takes up to {0} columns", kMaxColumns};
  if (desc.m > kMostRows) return {"takes up to {0} rows", kMostRows};
  return {};
}

}  // namespace marlin::cuda
