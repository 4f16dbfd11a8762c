#include "backends/cuda/plan/kernel_table.h"

#include <gtest/gtest.h>

#include <string>

#include "backends/cuda/layout/code_kind.h"

namespace marlin::cuda {
namespace {

// A quantized format without a decoder would be read as dense 16-bit numbers.
TEST(KindOf, EveryQuantizedFormatHasADecoder) {
  for (const FormatInfo& format : AllFormats()) {
    EXPECT_EQ(KindOf(format.format) == CodeKind::kDense16, !format.quantized) << format.name;
  }
}

TEST(CudaKernels, SayWhyTheyDecline) {
  GemmDesc desc;
  desc.m = 1;
  desc.n = desc.k = 256;
  desc.group_size = 128;
  desc.a_type = DType::kBf16;
  desc.weights.tiled = desc.weights.fits_f16 = true;
  const DeviceProperties device = {.level = Isa::kSm90};
  const auto supported = [&](GemmDesc changed) {
    std::string names;
    for (const KernelDesc& kernel : CudaKernels()) {
      if (kernel.chosen == Chosen::kByName) continue;
      const Support support = kernel.supports(changed, device);
      if (support.ok()) names += std::string(kernel.name).substr(sizeof("marlin_") - 1) + " ";
      EXPECT_NE(support.ok(), !support.reason().empty());
    }
    return names;
  };
  EXPECT_EQ(supported(desc), "gemv_mma gemm_wgmma gemm_cuda_exact ");
  GemmDesc rows = desc;
  rows.m = 17;
  EXPECT_EQ(supported(rows), "gemm_wgmma gemm_cuda_exact ");
  GemmDesc invariant = desc;
  invariant.determinism = Determinism::kBatchInvariant;
  EXPECT_EQ(supported(invariant), "gemm_wgmma gemm_cuda_exact ");
  GemmDesc canonical = desc;
  canonical.weights.tiled = false;
  EXPECT_EQ(supported(canonical), "gemm_cuda_exact ");
  GemmDesc floats = desc;
  floats.a_type = DType::kF32;
  EXPECT_EQ(supported(floats), "gemm_cuda_exact ");
  floats.allow_bf16_activations = true;
  EXPECT_EQ(supported(floats), "gemv_mma gemm_wgmma gemm_cuda_exact ");
  EXPECT_TRUE(NeedsStaging(floats));
  EXPECT_FALSE(NeedsStaging(desc));
}

}  // namespace
}  // namespace marlin::cuda
