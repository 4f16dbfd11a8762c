#include "backends/metal/plan/kernel_table.h"

#include <algorithm>
#include <array>

#include "backends/metal/plan/launch_plan.h"

namespace marlin::metal {
namespace {

/// Kernels count rows, columns and k in 32 bits.
constexpr int64_t kLargestSize = int64_t{1} << 30;

Support SupportsAny(const GemmDesc& desc, const DeviceProperties& device) {
  if (desc.accuracy == Accuracy::kW4A8) return {"does not quantize activations"};
  if (desc.determinism == Determinism::kBatchInvariant && device.fast_math) {
    return {"compiled with fast math, which may order sums differently for each m"};
  }
  if (std::max({desc.m, desc.n, desc.k}) > kLargestSize) return {"takes sizes up to 2^30"};
  return {};
}

/// Large-M kernels: not batch-invariant, because selection takes another kernel at small m.
Support SupportsManyRows(const GemmDesc& desc, const DeviceProperties& device) {
  if (desc.determinism == Determinism::kBatchInvariant) {
    return {"sums k in another order than the GEMV kernels"};
  }
  return SupportsAny(desc, device);
}

Support SupportsGemv(const GemmDesc& desc, const DeviceProperties& device) {
  if (desc.m > 1) return {"takes one row"};
  return SupportsAny(desc, device);
}

Support SupportsGemvWide(const GemmDesc& desc, const DeviceProperties& device) {
  // Above 16 rows it rereads the weights for every 16 rows; only batch invariance is worth that.
  if (desc.m > kGemvRows && desc.determinism != Determinism::kBatchInvariant) {
    return {"takes up to 16 rows"};
  }
  return SupportsAny(desc, device);
}

/// Kernels that decode weights straight into matrix fragments.
Support SupportsDirect(const GemmDesc& desc, const DeviceProperties& device) {
  if (!device.known_fragments) return {"this GPU lays out matrix fragments differently"};
  return SupportsManyRows(desc, device);
}

Support SupportsSplitK(const GemmDesc& desc, const DeviceProperties& device) {
  if (desc.m > kSplitKRows) return {"takes up to {} rows", kSplitKRows};
  return SupportsDirect(desc, device);
}

Support SupportsFusedFp4(const GemmDesc& desc, const DeviceProperties& device) {
  if (desc.format != Format::kFp4E2M1) return {"takes fp4_e2m1 alone"};
  return SupportsDirect(desc, device);
}

Support SupportsFusedU4(const GemmDesc& desc, const DeviceProperties& device) {
  if (desc.format != Format::kU4 && desc.format != Format::kS4) return {"takes u4 and s4 alone"};
  return SupportsDirect(desc, device);
}

Support SupportsFused(const GemmDesc& desc, const DeviceProperties& device) {
  if (SupportsFusedFp4(desc, device).ok()) return {"leaves fp4_e2m1 to marlin_gemm_fused_fp4"};
  if (SupportsFusedU4(desc, device).ok()) return {"leaves u4 and s4 to marlin_gemm_fused_u4"};
  return SupportsDirect(desc, device);
}

Support SupportsStaged(const GemmDesc& desc, const DeviceProperties& device) {
  return SupportsManyRows(desc, device);
}

Support SupportsFp4(const GemmDesc& desc, const DeviceProperties& device) {
  if (desc.format != Format::kFp4E2M1) return {"takes fp4_e2m1 alone"};
  return SupportsManyRows(desc, device);
}

constexpr auto kKernels = std::to_array<KernelDesc>({
#define MARLIN_METAL_KERNEL(name, chosen, tile_m, tile_n, tile_k, lanes, extra_depth, supports) \
  {#name,     "gemm",        Isa::kMetal, Grade::kExact,                                        \
   tile_m,    tile_n,        tile_k,      {3 * 0x1p-24, 0, 0x1p-24, lanes, extra_depth, 0},     \
   &supports, Chosen::chosen},
#include "backends/metal/plan/kernels.def"
#undef MARLIN_METAL_KERNEL
});

}  // namespace

std::span<const KernelDesc> MetalKernels() { return kKernels; }

double CostOf(const KernelDesc& kernel, const GemmDesc& /*desc*/) {
  return static_cast<double>(&kernel - kKernels.data());
}

DeviceProperties PropertiesOf(const DeviceShape& shape) {
  DeviceProperties device;
  device.level = Isa::kMetal;
  device.known_fragments = shape.known_fragments;
  device.fast_math = shape.fast_math;
  return device;
}

}  // namespace marlin::metal
