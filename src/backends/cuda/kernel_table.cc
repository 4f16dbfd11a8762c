#include "backends/cuda/kernel_table.h"

#include <array>
#include <limits>
#include <string>

#include "backends/cuda/launch_plan.h"

namespace marlin::cuda {
namespace {

Support SupportsTiles(const GemmDesc& desc) {
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
  if (desc.m > kMaxGemvRows) return {"takes up to 8 rows"};
  if (desc.determinism == Determinism::kBatchInvariant) return {"splits k as m asks for"};
  return SupportsTiles(desc);
}

Support SupportsWgmma(const GemmDesc& desc, const DeviceFacts& /*facts*/) {
  return SupportsTiles(desc);
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
  if (desc.n > kMaxColumns) return {"takes up to " + std::to_string(kMaxColumns) + " columns"};
  if (desc.m > std::numeric_limits<int32_t>::max() / 2) return {"takes up to 2^30 rows"};
  return {};
}

constexpr auto kKernels = std::to_array<KernelDesc>({
#define MARLIN_CUDA_KERNEL(name, grade, tile_m, tile_n, tile_k, weight_unit, accumulate_unit, \
                           supports)                                                          \
  {#name,    "gemm", Isa::kSm90, Grade::grade,                                                \
   tile_m,   tile_n, tile_k,     {weight_unit, 0, accumulate_unit, 1, 16, 0},                 \
   &supports},
#define MARLIN_CUDA_MEASURED_KERNEL(name, grade, tile_m, tile_n, tile_k, weight_unit, \
                                    accumulate_unit, supports)                        \
  {#name,     "gemm", Isa::kSm90, Grade::grade,                                       \
   tile_m,    tile_n, tile_k,     {weight_unit, 0, accumulate_unit, 1, 16, 0},        \
   &supports, true},
#include "backends/cuda/kernels.def"
#undef MARLIN_CUDA_MEASURED_KERNEL
#undef MARLIN_CUDA_KERNEL
});

}  // namespace

std::span<const KernelDesc> CudaKernels() { return kKernels; }

bool NeedsStaging(const GemmDesc& desc) {
  if (!desc.aligned) return true;
  return desc.a_type == DType::kF32 || (desc.a_type == DType::kF16 && !desc.fits_f16);
}

}  // namespace marlin::cuda
