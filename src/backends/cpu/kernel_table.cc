#include "backends/cpu/kernel_table.h"

#include <array>
#include <string>

namespace marlin::cpu {
namespace {

Support SupportsExact(const GemmDesc& desc, const DeviceFacts& /*facts*/) {
  if (desc.accuracy == Accuracy::kW4A8) return {"does not quantize activations"};
  return {};
}

Support SupportsAmx(const GemmDesc& desc, const DeviceFacts& /*facts*/) {
  if (desc.accuracy == Accuracy::kExact) return {"rounds weights to bf16"};
  if (desc.accuracy == Accuracy::kW4A8) return {"does not quantize activations"};
  return {};
}

constexpr auto kKernels = std::to_array<KernelDesc>({
#define MARLIN_CPU_KERNEL(name, level, grade, tile_m, tile_n, tile_k, weight_unit,           \
                          activation_unit, lanes, extra_depth, int8_block, supports)         \
  {#name,           "gemm",                                                                  \
   CpuLevel::level, Grade::grade,                                                            \
   tile_m,          tile_n,                                                                  \
   tile_k,          {weight_unit, activation_unit, 0x1p-24, lanes, extra_depth, int8_block}, \
   &supports},
#include "backends/cpu/kernels.def"
#undef MARLIN_CPU_KERNEL
});

}  // namespace

std::span<const KernelDesc> CpuKernels() { return kKernels; }

}  // namespace marlin::cpu
