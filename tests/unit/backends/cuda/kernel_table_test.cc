#include "backends/cuda/plan/kernel_table.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "backends/cuda/layout/code_kind.h"
#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda::kernel_table_test {
namespace {

// A quantized format without a decoder would be read as dense 16-bit numbers.
TEST(KindOf, EveryQuantizedFormatHasADecoder) {
  for (const FormatInfo& format : AllFormats()) {
    EXPECT_EQ(KindOf(format.format) == CodeKind::kDense16, !format.quantized) << format.name;
  }
}

TEST(CudaKernels, AreAvailableButForAMissingLibrary) {
  DeviceProperties device = {.level = Isa::kCuda};
  for (const bool installed : {false, true}) {
    device.has_dense_library = installed ? +[] { return true; } : +[] { return false; };
    for (const KernelDesc& kernel : CudaKernels()) {
      const bool needs_library = std::string_view(kernel.name) == "marlin_gemm_cublas";
      const Support available = CheckAvailable(kernel, device);
      EXPECT_EQ(available.ok(), installed || !needs_library) << kernel.name;
      EXPECT_NE(available.ok(), !available.reason().empty());
    }
  }
}

TEST(CudaKernels, SayWhyTheyDecline) {
  GemmDesc desc;
  desc.m = 1;
  desc.n = desc.k = 256;
  desc.group_size = 128;
  desc.a_type = DType::kBf16;
  desc.weights.tiled = desc.weights.fits_f16 = true;
  const DeviceProperties device = {.level = Isa::kCuda};
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
  EXPECT_EQ(supported(desc), "gemv_mma gemm_wgmma gemm_mma gemm_cuda_exact ");
  GemmDesc rows = desc;
  rows.m = 17;
  EXPECT_EQ(supported(rows), "gemm_wgmma gemm_mma gemm_cuda_exact ");
  GemmDesc invariant = desc;
  invariant.determinism = Determinism::kBatchInvariant;
  EXPECT_EQ(supported(invariant), "gemm_wgmma gemm_mma gemm_cuda_exact ");
  GemmDesc canonical = desc;
  canonical.weights.tiled = false;
  EXPECT_EQ(supported(canonical), "gemm_cuda_exact ");
  GemmDesc floats = desc;
  floats.a_type = DType::kF32;
  EXPECT_EQ(supported(floats), "gemm_cuda_exact ");
  floats.allow_bf16_activations = true;
  EXPECT_EQ(supported(floats), "gemv_mma gemm_wgmma gemm_mma gemm_cuda_exact ");
  EXPECT_TRUE(NeedsStaging(floats));
  EXPECT_FALSE(NeedsStaging(desc));
  GemmDesc sparse = desc;
  sparse.weights.sparse = true;
  EXPECT_EQ(supported(sparse),
            "gemv_sparse_mma gemm_sparse_wgmma gemm_sparse_mma gemm_cuda_exact ");
  sparse.m = 17;
  EXPECT_EQ(supported(sparse), "gemm_sparse_wgmma gemm_sparse_mma gemm_cuda_exact ");
  sparse.m = 1;
  sparse.determinism = Determinism::kBatchInvariant;
  EXPECT_EQ(supported(sparse), "gemm_sparse_wgmma gemm_sparse_mma gemm_cuda_exact ");
}

// The GEMV and the WGMMA kernel on sparse tensor cores read sparse tiles as they are, in less time
// than dense ones.
TEST(CudaKernels, EstimateSparseTiles) {
  GemmDesc dense;
  dense.n = dense.k = 8192;
  dense.a_type = DType::kBf16;
  dense.weights.tiled = dense.weights.fits_f16 = true;
  for (const int64_t group : {16, 32, 64, 128}) {
    dense.group_size = group;
    GemmDesc sparse = dense;
    sparse.weights.sparse = true;
    const int groups = static_cast<int>(kTileK / group);
    EXPECT_EQ(TileProblemOf(dense).tile_bytes, 2048 + groups * 64);
    EXPECT_EQ(TileProblemOf(sparse).tile_bytes, 1536 + groups * 64);
    EXPECT_EQ(TileProblemOf(sparse).narrow_codes, TileProblemOf(dense).narrow_codes);
  }
  const auto named = [](std::string_view name) -> const KernelDesc& {
    for (const KernelDesc& kernel : CudaKernels()) {
      if (kernel.name == name) return kernel;
    }
    ADD_FAILURE() << name;
    return CudaKernels()[0];
  };
  const DeviceShape device;
  const auto micros = [&](std::string_view name, const GemmDesc& desc) {
    return FamilyOf(named(name)).microseconds(desc, device);
  };
  GemmDesc sparse = dense;
  sparse.weights.sparse = true;
  for (const int64_t m : {1, 8, 16}) {
    dense.m = sparse.m = m;
    EXPECT_LT(micros("marlin_gemv_sparse_mma", sparse), micros("marlin_gemv_mma", dense));
    if (m > 8) continue;
    EXPECT_LT(micros("marlin_gemv_sparse_mma", sparse), micros("marlin_gemm_sparse_wgmma", sparse));
  }
  for (const int64_t m : {17, 100, 1024, 8192}) {
    dense.m = sparse.m = m;
    EXPECT_LT(micros("marlin_gemm_sparse_wgmma", sparse), micros("marlin_gemm_wgmma", dense));
  }
}

// Hopper chooses among its own kernels as if there were no others; elsewhere the MMA kernel is
// chosen from 17 rows on, and where the GEMV kernel declines.
TEST(CudaKernels, ChooseMmaWithoutWgmma) {
  const auto fastest = [](const GemmDesc& desc, bool has_wgmma) {
    DeviceProperties properties = {.level = Isa::kCuda};
    DeviceShape device;
    properties.has_wgmma = device.has_wgmma = has_wgmma;
    properties.cuda_code = device.code = has_wgmma ? 90 : 80;
    if (!has_wgmma) {
      for (int& clusters : device.clusters) clusters = 0;
    }
    std::string_view name;
    double least = 0;
    for (const KernelDesc& kernel : CudaKernels()) {
      if (kernel.chosen != Chosen::kByCost || !kernel.supports(desc, properties).ok()) continue;
      const double micros = FamilyOf(kernel).microseconds(desc, device);
      if (!name.empty() && micros >= least) continue;
      least = micros;
      name = kernel.name;
    }
    return name;
  };
  GemmDesc desc;
  desc.a_type = DType::kBf16;
  desc.group_size = 128;
  desc.weights.tiled = desc.weights.fits_f16 = true;
  for (const bool sparse : {false, true}) {
    desc.weights.sparse = sparse;
    for (const int64_t m : {1, 9, 16, 17, 64, 1000, 8192}) {
      for (const int64_t n : {96, 4096, 28672}) {
        desc.m = m;
        desc.n = desc.k = n;
        desc.determinism = Determinism::kDefault;
        EXPECT_EQ(fastest(desc, true).find("gemm_mma"), std::string_view::npos);
        EXPECT_EQ(fastest(desc, true).find("gemm_sparse_mma"), std::string_view::npos);
        const std::string_view gemm = sparse ? "marlin_gemm_sparse_mma" : "marlin_gemm_mma";
        const std::string_view gemv = sparse ? "marlin_gemv_sparse_mma" : "marlin_gemv_mma";
        EXPECT_EQ(fastest(desc, false), m <= 16 ? gemv : gemm);
        desc.determinism = Determinism::kBatchInvariant;
        EXPECT_EQ(fastest(desc, false), gemm);
      }
    }
  }
}

}  // namespace
}  // namespace marlin::cuda::kernel_table_test
