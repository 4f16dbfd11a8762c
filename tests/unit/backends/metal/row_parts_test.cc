#include "backends/metal/gemm/row_parts.h"

#include <gtest/gtest.h>

#include <array>

namespace marlin::metal::row_parts_test {
namespace {

GemmDesc DescOf(int64_t m, int64_t n, int64_t k) {
  GemmDesc desc;
  desc.m = m;
  desc.n = n;
  desc.k = k;
  return desc;
}

TEST(RowParts, OrdinaryProductsAreOne) {
  EXPECT_EQ(RowsOfPart(DescOf(1, 1, 0)), 1);
  EXPECT_EQ(RowsOfPart(DescOf(4096, 14336, 4096)), 4096);
  EXPECT_EQ(RowsOfPart(DescOf(8192, 8192, 8192)), 8192);
}

TEST(RowParts, LargeOnesAreWholeTiles) {
  const GemmDesc desc = DescOf(100'000, 152'064, 8192);
  const int64_t rows = RowsOfPart(desc);
  EXPECT_EQ(rows % 64, 0);
  EXPECT_LE(2 * rows * desc.n * desc.k, kMostOperationsOfPart);
  EXPECT_GT(2 * (rows + 64) * desc.n * desc.k, kMostOperationsOfPart);
}

TEST(RowParts, ATileIsTheLeast) {
  EXPECT_EQ(RowsOfPart(DescOf(1000, int64_t{1} << 30, int64_t{1} << 30)), 64);
  EXPECT_EQ(RowsOfPart(DescOf(10, int64_t{1} << 30, int64_t{1} << 30)), 10);
}

TEST(RowParts, BeginAtTheirRows) {
  std::array<std::byte, 1> a{};
  std::array<std::byte, 1> c{};
  const std::array<float, 300> weights{};
  GemmCall call;
  call.desc = DescOf(300, 10, 20);
  call.desc.a_type = DType::kBf16;
  call.desc.c_type = DType::kF32;
  call.a = a.data();
  call.a_stride = 24;
  call.c = c.data();
  call.c_stride = 12;
  call.epilogue.row_weight = weights.data();
  const GemmCall part = RowsOf(call, 64, 100);
  EXPECT_EQ(part.desc.m, 100);
  EXPECT_EQ(static_cast<const std::byte*>(part.a) - a.data(), 64 * 24 * 2);
  EXPECT_EQ(static_cast<std::byte*>(part.c) - c.data(), 64 * 12 * 4);
  EXPECT_EQ(part.epilogue.row_weight - weights.data(), 64);
  call.epilogue.row_weight = nullptr;
  EXPECT_EQ(RowsOf(call, 64, 100).epilogue.row_weight, nullptr);
}

}  // namespace
}  // namespace marlin::metal::row_parts_test
