#include "backends/cpu/kernel_table.h"

#include <array>
#include <string>

#include "backends/cpu/w4a8_kernel.h"

namespace marlin::cpu {
namespace {

Support SupportsExact(const GemmDesc& desc, const DeviceFacts& /*facts*/) {
  if (desc.accuracy == Accuracy::kW4A8) return {"does not quantize activations"};
  return {};
}

Support SupportsAmx(const GemmDesc& desc, const DeviceFacts& /*facts*/) {
  if (desc.accuracy == Accuracy::kExact) return {"rounds weights to bf16"};
  // Whoever keeps weights in fp32 wants their last bits.
  if (desc.format == Format::kFp32) return {"rounds fp32 weights to bf16"};
  if (desc.determinism == Determinism::kBatchInvariant) {
    return {"sums k in another order for up to 16 rows"};
  }
  if (desc.accuracy == Accuracy::kW4A8) return {"does not quantize activations"};
  return {};
}

Support SupportsW4a8(const GemmDesc& desc, const DeviceFacts& /*facts*/) {
  if (desc.accuracy != Accuracy::kW4A8) return {"quantizes activations: needs accuracy w4a8"};
  if (!HasByteCodes(desc.format)) {
    return {std::string(FormatName(desc.format)) + " values are not small integers"};
  }
  if (desc.has_biases) return {"weights have biases"};
  if (desc.group_size % kSliceK != 0 && desc.group_size < desc.k) {
    return {"group size " + std::to_string(desc.group_size) + " is not a multiple of " +
            std::to_string(kSliceK)};
  }
  return {};
}

Support SupportsVnni(const GemmDesc& desc, const DeviceFacts& facts) {
  if (!facts.avx512_vnni) return {"needs avx512_vnni"};
  return SupportsW4a8(desc, facts);
}

constexpr auto kKernels = std::to_array<KernelDesc>({
#define MARLIN_CPU_KERNEL(name, level, grade, tile_m, tile_n, tile_k, weight_unit,      \
                          activation_unit, lanes, extra_depth, int8_block, supports)    \
  {#name,      "gemm",                                                                  \
   Isa::level, Grade::grade,                                                            \
   tile_m,     tile_n,                                                                  \
   tile_k,     {weight_unit, activation_unit, 0x1p-24, lanes, extra_depth, int8_block}, \
   &supports},
#include "backends/cpu/kernels.def"
#undef MARLIN_CPU_KERNEL
});

}  // namespace

std::span<const KernelDesc> CpuKernels() { return kKernels; }

}  // namespace marlin::cpu
