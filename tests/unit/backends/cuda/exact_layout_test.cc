// How the exact kernel splits k: every unit of k in one part, and sums no deeper than declared.
#include "backends/cuda/gemm/exact/exact_layout.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "backends/cuda/plan/tile_problem.h"

namespace marlin::cuda::exact_layout_test {
namespace {

TEST(ExactParts, CoverKWithoutEmptyOnes) {
  for (int k = 1; k < 70000; k += k < 3000 ? 1 : 977) {
    const ExactParts plan = PlanExactParts(k);
    ASSERT_GE(plan.units * kExactUnit, k);
    ASSERT_LT((plan.units - 1) * kExactUnit, k);
    ASSERT_GE(plan.parts, 1);
    ASSERT_LE(plan.parts, kMaxExactParts);
    ASSERT_GE(plan.parts * plan.units_of_part, plan.units);
    ASSERT_LT((plan.parts - 1) * plan.units_of_part, plan.units) << k;
  }
}

TEST(ExactParts, OfNothingAreOneOfZero) {
  const ExactParts plan = PlanExactParts(0);
  EXPECT_EQ(plan.units, 0);
  EXPECT_EQ(plan.parts, 1);
  EXPECT_EQ(ExactWarpsFor(1, plan.parts), 1);
}

TEST(ExactParts, KeepSumsWithinTheDeclaredDepth) {
  constexpr int kDeclared = 16;  // ErrorModel::extra_depth.
  constexpr int kLanes = 2;      // Additions that reduce four lanes.
  for (int k = 1; k < 20000; k += 13) {
    const ExactParts plan = PlanExactParts(k);
    // Zeros beyond k are added without rounding.
    const int chain = std::min(plan.units_of_part * kExactSteps * kExactStepK, k);
    ASSERT_LE(chain + kLanes + plan.parts - 1, k + kDeclared) << k;
  }
}

TEST(ExactRows, FitSharedMemory) {
  for (const int m : {1, 2, 4, 5, 8, 9, 16, 1 << 30}) {
    const int rows = ExactRowsFor(m);
    EXPECT_TRUE(rows >= m || rows == 16) << m;
    EXPECT_LE(ExactSharedBytes(rows, kMaxExactParts, kMaxExactParts), DeviceShape().shared_bytes);
  }
}

TEST(ExactWarps, AreNoMoreThanParts) {
  for (const int64_t blocks : {int64_t{1}, int64_t{128}, int64_t{1} << 40}) {
    for (int parts = 1; parts <= kMaxExactParts; ++parts) {
      const int warps = ExactWarpsFor(blocks, parts);
      EXPECT_GE(warps, 1);
      EXPECT_LE(warps, parts);
    }
  }
}

}  // namespace
}  // namespace marlin::cuda::exact_layout_test
