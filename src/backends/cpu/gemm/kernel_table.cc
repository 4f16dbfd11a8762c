#include "backends/cpu/gemm/kernel_table.h"

#include <algorithm>
#include <array>
#include <bit>
#include <string_view>

#include "backends/cpu/gemm/gemm_driver.h"
#include "backends/cpu/gemm/gemv_kernel.h"
#include "backends/cpu/gemm/sparse/sparse_kernel.h"
#include "backends/cpu/gemm/w4a8/w4a8_kernel.h"

namespace marlin::cpu {
namespace {

Support SupportsExact(const GemmDesc& desc, const DeviceProperties& /*device*/) {
  if (desc.accuracy == Accuracy::kW4A8) return {"does not quantize activations"};
  return {};
}

/// The limits of every bf16_compute kernel.
Support SupportsBf16(const GemmDesc& desc) {
  if (desc.accuracy == Accuracy::kExact) return {"rounds weights to bf16"};
  // fp32 weights are kept for their full precision.
  if (desc.format == Format::kFp32) return {"rounds fp32 weights to bf16"};
  if (desc.accuracy == Accuracy::kW4A8) return {"does not quantize activations"};
  return {};
}

Support SupportsAmx(const GemmDesc& desc, const DeviceProperties& /*device*/) {
  if (desc.determinism == Determinism::kBatchInvariant) {
    return {"sums k in another order for up to 16 rows"};
  }
  return SupportsBf16(desc);
}

Support SupportsAvx512Bf16(const GemmDesc& desc, const DeviceProperties& device) {
  if (!device.avx512_bf16) return {"needs avx512_bf16"};
  return SupportsBf16(desc);
}

Support SupportsSparseGemv(const GemmDesc& desc, const DeviceProperties& device) {
  if (!desc.weights.sparse) return {"takes 2:4 weights alone"};
  if (desc.m > kSparseGemvRows) return {"m {} is over 8", desc.m};
  static_assert(kSparseGemvRows == 8);
  if (desc.determinism == Determinism::kBatchInvariant) {
    return {"sums k in another order than GEMMs of more rows"};
  }
  if (NeedsTwoTerms(desc)) return {"rounds activations to bf16"};
  return SupportsAvx512Bf16(desc, device);
}

Support SupportsW4a8(const GemmDesc& desc, const DeviceProperties& /*device*/) {
  if (desc.accuracy != Accuracy::kW4A8) return {"quantizes activations: needs accuracy w4a8"};
  if (!HasByteCodes(desc.format)) {
    return {"{1} values are not small integers", 0, FormatName(desc.format)};
  }
  if (desc.has_biases) return {"weights have biases"};
  if (desc.group_size % kSliceK != 0 && desc.group_size < desc.k) {
    static_assert(kSliceK == 32);
    return {"group size {} is not a multiple of 32", desc.group_size};
  }
  return {};
}

Support SupportsVnni(const GemmDesc& desc, const DeviceProperties& device) {
  if (!device.avx512_vnni) return {"needs avx512_vnni"};
  return SupportsW4a8(desc, device);
}

/// The limits of every GEMV.
Support SupportsFewRows(const GemmDesc& desc) {
  if (desc.m > kGemvRows) return {"m {} is over 8", desc.m};
  static_assert(kGemvRows == 8);
  if (desc.determinism == Determinism::kBatchInvariant)
    return {"sums depend on the number of rows"};
  if (desc.accuracy == Accuracy::kW4A8) return {"does not quantize activations"};
  const FormatInfo& info = GetFormatInfo(desc.format);
  if (!info.quantized || info.bits > 4) {
    return {"{1} codes have over 4 bits", 0, FormatName(desc.format)};
  }
  return {};
}

/// Whether every value of a format, known without its weights, is one of bf16.
bool HasBf16Values(Format format) {
  const std::span<const float> values = FormatValues(format);
  return !GetFormatInfo(format).has_codebook &&
         std::all_of(values.begin(), values.end(),
                     [](float value) { return (std::bit_cast<uint32_t>(value) & 0xffff) == 0; });
}

Support SupportsGemv(const GemmDesc& desc, const DeviceProperties& /*device*/) {
  const Support few = SupportsFewRows(desc);
  if (few.ok() && !HasBf16Values(desc.format)) {
    return {"rounds the values of {1} to bf16", 0, FormatName(desc.format)};
  }
  return few;
}

/// Supports the formats of SupportsGemv too, but comes after it in kernels.def.
Support SupportsGemvBf16(const GemmDesc& desc, const DeviceProperties& /*device*/) {
  if (desc.accuracy == Accuracy::kExact) return {"rounds weights to bf16"};
  return SupportsFewRows(desc);
}

/// The limits of the GEMMs of 2:4 weights on AVX2.
Support SupportsAnySparse(const GemmDesc& desc, const DeviceProperties& device) {
  if (!desc.weights.sparse) return {"takes 2:4 weights alone"};
  if (device.level != Isa::kAvx2) return {"is for processors without AVX-512"};
  if (desc.accuracy == Accuracy::kW4A8) return {"does not quantize activations"};
  return {};
}

Support SupportsSparseGemm(const GemmDesc& desc, const DeviceProperties& device) {
  const Support any = SupportsAnySparse(desc, device);
  if (any.ok() && !HasBf16Values(desc.format)) {
    return {"rounds the values of {1} to bf16", 0, FormatName(desc.format)};
  }
  return any;
}

/// Supports the formats of SupportsSparseGemm too, but comes after it in kernels.def.
Support SupportsSparseGemmBf16(const GemmDesc& desc, const DeviceProperties& device) {
  if (desc.accuracy == Accuracy::kExact) return {"rounds weights to bf16"};
  return SupportsAnySparse(desc, device);
}

/// Time per weight and row relative to the scalar kernels: 1 / vector lanes.
double LevelCost(Isa level) {
  switch (level) {
    case Isa::kAvx512:
    case Isa::kAmx:
      return 1.0 / 16;
    case Isa::kAvx2:
      return 1.0 / 8;
    case Isa::kNeon:
      return 1.0 / 4;
    default:
      return 1;
  }
}

constexpr auto kKernels = std::to_array<KernelDesc>({
#define MARLIN_CPU_KERNEL(name, level, grade, tile_m, tile_n, tile_k, weight_unit,      \
                          activation_unit, lanes, extra_depth, int8_block, supports)    \
  {#name,      "gemm",                                                                  \
   Isa::level, Grade::grade,                                                            \
   tile_m,     tile_n,                                                                  \
   tile_k,     {weight_unit, activation_unit, 0x1p-24, lanes, extra_depth, int8_block}, \
   &supports},
#include "backends/cpu/gemm/kernels.def"
#undef MARLIN_CPU_KERNEL
});

/// The time of `rows` rows of bf16 dot products, in units of one row of the exact kernel, as
/// measured on a Zen 5 (docs/kernels/cpu-bf16.md). Split activations are a tenth to a quarter
/// faster than in the exact kernel, which is not worth its accuracy.
double CostOfDots(double rows, const GemmDesc& desc, const DeviceProperties& device) {
  if (!device.fast_bf16_dots) return 3 * rows;
  return NeedsTwoTerms(desc) ? 1.1 * rows : 0.5 + rows / 4;
}

/// The time of the GEMV of 2:4 weights, in the same units: it gathers activations, where the GEMM
/// has to expand the weights.
double CostOfSparse(double rows, const DeviceProperties& device) {
  return device.fast_bf16_dots ? 0.4 + rows / 4 : 3 * rows;
}

/// The time of the GEMM of 2:4 weights on AVX2, in units of one row of the exact kernel there: less
/// than any other kernel for every number of rows, which batch-invariant results rely on.
double CostOfSparseGemm(double rows) { return 0.3 + rows * 0.45; }

/// The time of the GEMV, in units of one row of the exact kernel on AVX2.
double CostOfGemv(double rows) { return 0.4 + rows / 2; }

}  // namespace

std::span<const KernelDesc> CpuKernels() { return kKernels; }

bool IsGemv(const KernelDesc& kernel) {
  return std::string_view(kernel.name).starts_with("marlin_gemv_avx2");
}

bool IsSparseGemv(const KernelDesc& kernel) {
  return std::string_view(kernel.name).starts_with("marlin_gemv_sparse_");
}

bool IsSparseGemm(const KernelDesc& kernel) {
  return std::string_view(kernel.name).starts_with("marlin_gemm_sparse_avx2");
}

double CostOf(const KernelDesc& kernel, const GemmDesc& desc, const DeviceProperties& device) {
  const double weights = static_cast<double>(desc.n) * static_cast<double>(desc.k);
  const auto rows = static_cast<double>(desc.m);
  if (IsGemv(kernel)) return weights * CostOfGemv(rows) * LevelCost(kernel.level);
  if (IsSparseGemm(kernel)) return weights * CostOfSparseGemm(rows) * LevelCost(kernel.level);
  if (IsSparseGemv(kernel)) {
    return weights * CostOfSparse(rows, device) * LevelCost(kernel.level);
  }
  if (kernel.level == Isa::kAvx512 && kernel.grade == Grade::kBf16Compute) {
    return weights * CostOfDots(rows, desc, device) * LevelCost(Isa::kAvx512);
  }
  if (kernel.level != Isa::kAmx) return weights * rows * LevelCost(kernel.level);
  // On a Xeon with AMX, the AMX kernel takes as long for one row as the AVX-512 kernels for 4 to 5
  // (2026-11-21, bench/records); each further row costs 1 / 16 of one on AVX-512.
  constexpr double kLeastRows = 4.5;
  return weights * (kLeastRows + rows / 16) * LevelCost(Isa::kAvx512);
}

}  // namespace marlin::cpu
