#include "backends/metal/kernel_table.h"

#include <algorithm>
#include <array>
#include <string>

#include "backends/metal/launch_plan.h"

namespace marlin::metal {
namespace {

/// Kernels count rows, columns and k in 32 bits.
constexpr int64_t kLargestSize = int64_t{1} << 30;

Support SupportsAny(const GemmDesc& desc, const DeviceFacts& facts) {
  if (desc.accuracy == Accuracy::kW4A8) return {"does not quantize activations"};
  if (desc.determinism == Determinism::kBatchInvariant && facts.fast_math) {
    return {"compiled with fast math, which orders sums as each number of rows suggests"};
  }
  if (std::max({desc.m, desc.n, desc.k}) > kLargestSize) return {"takes sizes up to 2^30"};
  return {};
}

/// What a batch-invariant product may not run on: rules choose another kernel for other m.
Support SupportsManyRows(const GemmDesc& desc, const DeviceFacts& facts) {
  if (desc.determinism == Determinism::kBatchInvariant) {
    return {"sums k in another order than the kernels for few rows"};
  }
  return SupportsAny(desc, facts);
}

Support SupportsGemv(const GemmDesc& desc, const DeviceFacts& facts) {
  if (desc.m > 1) return {"takes one row"};
  return SupportsAny(desc, facts);
}

Support SupportsGemvWide(const GemmDesc& desc, const DeviceFacts& facts) {
  // Reads the weights again for every 16 rows, which only that promise is worth.
  if (desc.m > kGemvRows && desc.determinism != Determinism::kBatchInvariant) {
    return {"takes up to 16 rows"};
  }
  return SupportsAny(desc, facts);
}

/// Kernels that put weights straight into fragments.
Support SupportsDirect(const GemmDesc& desc, const DeviceFacts& facts) {
  if (!facts.known_fragments) return {"this GPU keeps matrix fragments in another order"};
  return SupportsManyRows(desc, facts);
}

Support SupportsSplitK(const GemmDesc& desc, const DeviceFacts& facts) {
  if (desc.m > kSplitKRows) return {"takes up to " + std::to_string(kSplitKRows) + " rows"};
  return SupportsDirect(desc, facts);
}

Support SupportsFusedFp4(const GemmDesc& desc, const DeviceFacts& facts) {
  if (desc.format != Format::kFp4E2M1) return {"takes fp4_e2m1 alone"};
  return SupportsDirect(desc, facts);
}

Support SupportsFusedU4(const GemmDesc& desc, const DeviceFacts& facts) {
  if (desc.format != Format::kU4 && desc.format != Format::kS4) return {"takes u4 and s4 alone"};
  return SupportsDirect(desc, facts);
}

Support SupportsFused(const GemmDesc& desc, const DeviceFacts& facts) {
  if (SupportsFusedFp4(desc, facts).ok()) return {"leaves fp4_e2m1 to marlin_gemm_fused_fp4"};
  if (SupportsFusedU4(desc, facts).ok()) return {"leaves u4 and s4 to marlin_gemm_fused_u4"};
  return SupportsDirect(desc, facts);
}

Support SupportsStaged(const GemmDesc& desc, const DeviceFacts& facts) {
  return SupportsManyRows(desc, facts);
}

Support SupportsFp4(const GemmDesc& desc, const DeviceFacts& facts) {
  if (desc.format != Format::kFp4E2M1) return {"takes fp4_e2m1 alone"};
  return SupportsManyRows(desc, facts);
}

constexpr auto kKernels = std::to_array<KernelDesc>({
#define MARLIN_METAL_KERNEL(name, chosen, tile_m, tile_n, tile_k, lanes, extra_depth, supports) \
  {#name,     "gemm",        Isa::kMetal, Grade::kExact,                                        \
   tile_m,    tile_n,        tile_k,      {3 * 0x1p-24, 0, 0x1p-24, lanes, extra_depth, 0},     \
   &supports, Chosen::chosen},
#include "backends/metal/kernels.def"
#undef MARLIN_METAL_KERNEL
});

}  // namespace

std::span<const KernelDesc> MetalKernels() { return kKernels; }

DeviceFacts FactsOf(const DeviceShape& device) {
  DeviceFacts facts;
  facts.level = Isa::kMetal;
  facts.known_fragments = device.known_fragments;
  facts.fast_math = device.fast_math;
  return facts;
}

}  // namespace marlin::metal
