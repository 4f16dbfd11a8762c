#include "backends/cuda/plan/kernel_table.h"

#include <array>

namespace marlin::cuda {

// Declares <Family>Family and Supports of every row; the family's folder defines them.
#define MARLIN_CUDA_KERNEL(name, family, grade, chosen, tile_m, tile_n, tile_k, weight_unit, \
                           accumulate_unit, supports)                                        \
  const KernelFamily& family##Family();                                                      \
  Support supports(const GemmDesc& desc, const DeviceProperties& device);
#define MARLIN_CUDA_W4_KERNEL(...) MARLIN_CUDA_KERNEL(__VA_ARGS__)
#include "backends/cuda/plan/kernels.def"
#undef MARLIN_CUDA_W4_KERNEL
#undef MARLIN_CUDA_KERNEL

namespace {

/// The error model of an accuracy class. FP8 MMAs keep 13 fraction bits below their largest addend;
/// four of them, of 32 products and a sum each, are chained before the fp32 sum.
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
#define MARLIN_ROW(w4, name, family, grade, chosen, tile_m, tile_n, tile_k, weight_unit,       \
                   accumulate_unit, supports)                                                  \
  {#name,     "gemm",         Isa::kCuda, Grade::grade,                                        \
   tile_m,    tile_n,         tile_k,     ModelOf(Grade::grade, weight_unit, accumulate_unit), \
   &supports, Chosen::chosen, w4},
#define MARLIN_CUDA_KERNEL(...) MARLIN_ROW(false, __VA_ARGS__)
#define MARLIN_CUDA_W4_KERNEL(...) MARLIN_ROW(true, __VA_ARGS__)
#include "backends/cuda/plan/kernels.def"
#undef MARLIN_CUDA_W4_KERNEL
#undef MARLIN_CUDA_KERNEL
#undef MARLIN_ROW
});

/// The family of each row, in the order of kKernels.
constexpr const KernelFamily& (*kFamilies[])() = {
#define MARLIN_CUDA_KERNEL(name, family, ...) &family##Family,
#define MARLIN_CUDA_W4_KERNEL(...) MARLIN_CUDA_KERNEL(__VA_ARGS__)
#include "backends/cuda/plan/kernels.def"
#undef MARLIN_CUDA_W4_KERNEL
#undef MARLIN_CUDA_KERNEL
};

bool IsEmpty(const GemmDesc& desc) { return desc.m <= 0 || desc.n <= 0 || desc.k <= 0; }

}  // namespace

std::span<const KernelDesc> CudaKernels() { return kKernels; }

const KernelFamily& FamilyOf(const KernelDesc& kernel) {
  return kFamilies[&kernel - kKernels.data()]();
}

Support CheckAvailable(const KernelDesc& kernel, const DeviceProperties& device) {
  const KernelFamily& family = FamilyOf(kernel);
  return family.available == nullptr ? Support() : family.available(device);
}

std::vector<KernelVariant> VariantsOf(const KernelDesc& kernel, const GemmDesc& desc,
                                      const DeviceShape& device) {
  const KernelFamily& family = FamilyOf(kernel);
  if (family.variants == nullptr || IsEmpty(desc)) return {};
  return family.variants(desc, device);
}

bool CanRunAs(const KernelDesc& kernel, const GemmDesc& desc, const DeviceShape& device,
              const KernelVariant& variant) {
  const KernelFamily& family = FamilyOf(kernel);
  return family.can_run_as != nullptr && !IsEmpty(desc) && family.can_run_as(desc, device, variant);
}

bool NeedsStaging(const GemmDesc& desc) {
  if (!desc.aligned || desc.accuracy == Accuracy::kW4A8) return true;
  return desc.a_type == DType::kF32 || (desc.a_type == DType::kF16 && !desc.weights.fits_f16);
}

}  // namespace marlin::cuda
