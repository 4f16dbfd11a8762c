// A kernel that outputs ones for any weights: proof that a kernel is one folder and one row.
#include "backends/cuda/plan/kernel_family.h"

namespace marlin::cuda {
namespace {

double Microseconds(const GemmDesc& desc, const DeviceShape& device) {
  return static_cast<double>(desc.m * desc.n) / device.multiprocessors;
}

}  // namespace

const KernelFamily& ToyFamily() {
  static constexpr KernelFamily kFamily = {Microseconds, nullptr, nullptr};
  return kFamily;
}

Support SupportsToy(const GemmDesc& desc, const DeviceProperties& /*device*/) {
  if (desc.m > 4) return {"takes up to {0} rows", 4};
  return SupportsTiles(desc);
}

}  // namespace marlin::cuda
