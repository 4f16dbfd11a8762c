#include "backends/cuda/kernel_table.h"

#include <array>
#include <limits>
#include <string>

#include "backends/cuda/gemv_plan.h"

namespace marlin::cuda {
namespace {

Support SupportsTiles(const GemmDesc& desc) {
  if (desc.marlin_w4) return {"does not read the marlin_w4 layout"};
  if (desc.accuracy == Accuracy::kExact) return {"rounds weights to 16 bits"};
  if (desc.accuracy == Accuracy::kW4A8) return {"does not quantize activations"};
  if (!desc.tiled) {
    if (desc.format == Format::kFp32) return {"rounds fp32 weights to 16 bits"};
    if (desc.scale_type == ScaleType::kF32) return {"rounds fp32 scales to 16 bits"};
    return {"groups of " + std::to_string(desc.group_size) +
            " share no power of two from 16 up, or biases and scales have different types"};
  }
  if (desc.a_type == DType::kF32 && !desc.allow_bf16_activations) {
    return {"rounds fp32 activations to bf16: needs allow_bf16_activations"};
  }
  if (desc.a_type == DType::kF16 && !desc.fits_f16 && !desc.allow_bf16_activations) {
    return {"these weights leave the range of fp16: needs allow_bf16_activations"};
  }
  if (desc.m > std::numeric_limits<int32_t>::max() / 2) return {"takes up to 2^30 rows"};
  return {};
}

Support SupportsGemv(const GemmDesc& desc, const DeviceFacts& /*facts*/) {
  if (desc.m > kMaxGemvRows) return {"takes up to 16 rows"};
  if (desc.determinism == Determinism::kBatchInvariant) return {"splits k as m asks for"};
  return SupportsTiles(desc);
}

Support SupportsWgmma(const GemmDesc& desc, const DeviceFacts& /*facts*/) {
  return SupportsTiles(desc);
}

Support SupportsFp8(const GemmDesc& desc, const DeviceFacts& /*facts*/) {
  if (desc.accuracy != Accuracy::kW4A8) return {"quantizes activations: needs accuracy w4a8"};
  if (desc.marlin_w4) return {"does not read the marlin_w4 layout"};
  if (!desc.tiled || !desc.fits_fp8) {
    return {
        "groups are no multiple of 32, scales are fp32, or codes less their zeros or biases do "
        "not fit e4m3"};
  }
  if (desc.m > std::numeric_limits<int32_t>::max() / 2) return {"takes up to 2^30 rows"};
  return {};
}

Support SupportsCublas(const GemmDesc& desc, const DeviceFacts& facts) {
  if (facts.has_dense_library == nullptr || !facts.has_dense_library()) {
    return {"libcublas.so.13 or .12 is not installed; MARLIN_CUBLAS may name it"};
  }
  if (desc.determinism == Determinism::kBatchInvariant) return {"cuBLAS divides k as m asks for"};
  return SupportsTiles(desc);
}

Support SupportsExact(const GemmDesc& desc, const DeviceFacts& /*facts*/) {
  constexpr int64_t kMaxColumns = 65535 * 32;
  if (desc.accuracy == Accuracy::kW4A8) return {"does not quantize activations"};
  if (desc.marlin_w4) return {"does not read the marlin_w4 layout"};
  if (desc.n > kMaxColumns) return {"takes up to " + std::to_string(kMaxColumns) + " columns"};
  if (desc.m > std::numeric_limits<int32_t>::max() / 2) return {"takes up to 2^30 rows"};
  return {};
}

Support SupportsFp4(const GemmDesc& desc, const DeviceFacts& /*facts*/) {
  if (desc.format != Format::kFp4E2M1) return {"takes fp4_e2m1 alone"};
  return SupportsTiles(desc);
}

Support SupportsInt4(const GemmDesc& desc, const DeviceFacts& /*facts*/) {
  if (desc.format != Format::kU4 && desc.format != Format::kS4) return {"takes u4 and s4 alone"};
  return SupportsTiles(desc);
}

Support SupportsMarlinW4(const GemmDesc& desc, const DeviceFacts& /*facts*/) {
  if (!desc.marlin_w4) return {"takes weights that were prepared in the marlin_w4 layout"};
  // Its operands are those of tiles.
  GemmDesc in_tiles = desc;
  in_tiles.tiled = true;
  in_tiles.marlin_w4 = false;
  return SupportsTiles(in_tiles);
}

/// What a kernel of a grade declares; the matrix unit's sums of e4m3 numbers keep 13 bits behind
/// the point of their largest addend: four instructions of 32 products and a sum.
constexpr ErrorModel ModelOf(Grade grade, double weight_unit, double accumulate_unit) {
  ErrorModel model = {weight_unit, 0, accumulate_unit, 1, 16, 0};
  if (grade == Grade::kW4A8) {
    model.activation_unit = 0x1p-4;
    model.activation_floor = 0x1p-10 / 224;
    model.block_unit = 0x1p-13;
    model.block_depth = 4 * (32 + 2);
  }
  return model;
}

constexpr auto kKernels = std::to_array<KernelDesc>({
#define MARLIN_ROW(w4, name, grade, chosen, tile_m, tile_n, tile_k, weight_unit, accumulate_unit, \
                   supports)                                                                      \
  {#name,     "gemm",         Isa::kSm90, Grade::grade,                                           \
   tile_m,    tile_n,         tile_k,     ModelOf(Grade::grade, weight_unit, accumulate_unit),    \
   &supports, Chosen::chosen, w4},
#define MARLIN_CUDA_KERNEL(...) MARLIN_ROW(false, __VA_ARGS__)
#define MARLIN_CUDA_W4_KERNEL(...) MARLIN_ROW(true, __VA_ARGS__)
#include "backends/cuda/kernels.def"
#undef MARLIN_CUDA_W4_KERNEL
#undef MARLIN_CUDA_KERNEL
#undef MARLIN_ROW
});

}  // namespace

std::span<const KernelDesc> CudaKernels() { return kKernels; }

bool NeedsStaging(const GemmDesc& desc) {
  if (!desc.aligned) return true;
  return desc.a_type == DType::kF32 || (desc.a_type == DType::kF16 && !desc.fits_f16);
}

}  // namespace marlin::cuda
