// Selection of compiled kernels by the kind of tiles.
#include "backends/cuda/plan/kernel_instances.h"

#include <gtest/gtest.h>

namespace marlin::cuda {

/// A function for every kind, and whether it is called for sparse tiles.
struct TestKernels {
  struct Variant {
    const int* of_sparse;
    const int* of_dense;
  };
  template <typename Tiles>
  static const void* Function(const Variant& variant) {
    return (Tiles::kSparse ? variant.of_sparse : variant.of_dense) +
           static_cast<int>(Tiles::kCodes);
  }
};

template <>
struct KindsOf<TestKernels> {
  static constexpr KindSet kDense = {CodeKind::kFp4, CodeKind::kInt8};
  static constexpr KindSet kSparse = {CodeKind::kFp4, CodeKind::kInt4};
  static constexpr bool kIsBuilt = true;
};

namespace {

TEST(KernelInstances, AreFoundByCodesAndSparsity) {
  const int sparse[16] = {};
  const int dense[16] = {};
  const TestKernels::Variant variant = {sparse, dense};
  for (int i = 0; i <= static_cast<int>(CodeKind::kDense16); ++i) {
    const auto kind = static_cast<CodeKind>(i);
    const bool has_dense = kind == CodeKind::kFp4 || kind == CodeKind::kInt8;
    const bool has_sparse = kind == CodeKind::kFp4 || kind == CodeKind::kInt4;
    EXPECT_EQ(FunctionOf<TestKernels>({kind, false}, variant), has_dense ? dense + i : nullptr)
        << i;
    EXPECT_EQ(FunctionOf<TestKernels>({kind, true}, variant), has_sparse ? sparse + i : nullptr)
        << i;
  }
}

TEST(KernelInstances, SparseTilesHaveFourBits) {
  for (int i = 0; i <= static_cast<int>(CodeKind::kDense16); ++i) {
    const auto kind = static_cast<CodeKind>(i);
    EXPECT_EQ(kinds::kSparse.Has(kind), CodeBits(kind) == 4) << i;
    EXPECT_TRUE(kinds::kAll.Has(kind)) << i;
    EXPECT_FALSE(kinds::kNone.Has(kind)) << i;
  }
}

}  // namespace
}  // namespace marlin::cuda
