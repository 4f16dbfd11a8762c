// Products that calibration leaves to the device.
#include "calibrate/device_products.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "../test_device.h"
#include "calibrate/gram_sums.h"

namespace marlin::device_products_test {
namespace {

std::vector<float> Normal(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

/// Expects out[c][i] = sum over j of matrix[first + i][j] * panel[c][j].
void ExpectProducts(const std::vector<float>& matrix, const std::vector<float>& panel, int64_t k,
                    int64_t first, const std::vector<float>& out) {
  const int64_t columns = static_cast<int64_t>(panel.size()) / k;
  const int64_t rows = static_cast<int64_t>(out.size()) / columns;
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t i = 0; i < rows; ++i) {
      double expected = 0;
      for (int64_t j = 0; j < k; ++j) {
        expected += static_cast<double>(matrix[static_cast<size_t>((first + i) * k + j)]) *
                    static_cast<double>(panel[static_cast<size_t>(c * k + j)]);
      }
      ASSERT_NEAR(out[static_cast<size_t>(c * rows + i)], expected, 1e-4) << c << " " << i;
    }
  }
}

TEST(DeviceProducts, MultiplyEveryBlockWithThePanel) {
  const auto device = Device::Open(TestDevice());
  ASSERT_TRUE(device.ok()) << device.status().message();
  ThreadPool pool(2);
  DeviceProducts products(*device, pool);
  constexpr int64_t kRows = 64;
  // The second panel is smaller: it takes the memory of the first.
  for (const auto& [k, columns] : {std::pair<int64_t, int64_t>{150, 37}, {100, 5}}) {
    const std::vector<float> matrix = Normal(k * k, 1);
    std::vector<float> panel = Normal(k * columns, 2);
    const auto uploaded = products.Upload(matrix, k, kRows);
    ASSERT_TRUE(uploaded.ok()) << uploaded.status().message();
    ASSERT_TRUE(products.SetPanel(panel, k).ok());
    for (int round = 0; round < 2; ++round) {
      for (int64_t first = 0; first < k; first += kRows) {
        std::vector<float> out(static_cast<size_t>(std::min(kRows, k - first) * columns));
        ASSERT_TRUE(products.Multiply(**uploaded, first / kRows, out).ok());
        ExpectProducts(matrix, panel, k, first, out);
      }
      constexpr int64_t kFirst = 19;
      constexpr int64_t kCount = 33;
      const std::vector<float> rows = Normal(kCount * columns, 3);
      ASSERT_TRUE(products.ReplaceRows(kFirst, kCount, rows).ok());
      for (int64_t c = 0; c < columns; ++c) {
        std::copy_n(rows.begin() + c * kCount, kCount, panel.begin() + c * k + kFirst);
      }
    }
  }
}

/// Adds x [rows, k], and its products with y, on the test's device, twice.
void ExpectSumsOfBothStreams(int64_t rows, int64_t k) {
  const auto device = Device::Open(TestDevice());
  ASSERT_TRUE(device.ok()) << device.status().message();
  ThreadPool pool(2);
  GramProducts products(*device, pool);
  const std::vector<float> x = Normal(rows * k, 4);
  const std::vector<float> y = Normal(rows * k, 5);
  std::vector<std::vector<double>> means;
  for (int run = 0; run < 2; ++run) {
    GramSums gram(products, k);
    GramSums cross(products, k);
    const Status added = GramSums::AddBoth(y.data(), x.data(), rows, &gram, &cross);
    ASSERT_TRUE(added.ok()) << added.message();
    EXPECT_EQ(gram.rows(), rows);
    EXPECT_EQ(cross.rows(), rows);
    means.push_back(gram.Mean());
    means.push_back(cross.Mean());
  }
  EXPECT_EQ(means[0], means[2]);
  EXPECT_EQ(means[1], means[3]);
  const auto at = [k](int64_t row, int64_t column) {
    return static_cast<size_t>(row * k + column);
  };
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < k; ++j) {
      double gram = 0;
      double cross = 0;
      for (int64_t row = 0; row < rows; ++row) {
        const auto right = static_cast<double>(x[at(row, j)]);
        gram += static_cast<double>(x[at(row, i)]) * right;
        cross += static_cast<double>(y[at(row, i)]) * right;
      }
      const auto count = static_cast<double>(rows);
      ASSERT_NEAR(means[0][at(i, j)], gram / count, 1e-6) << i << " " << j;
      ASSERT_NEAR(means[1][at(i, j)], cross / count, 1e-6) << i << " " << j;
      ASSERT_EQ(means[0][at(i, j)], means[0][at(j, i)]) << i << " " << j;
    }
  }
}

TEST(GramSums, AddsProductsOfBothStreams) {
  ExpectSumsOfBothStreams(4500, 40);  // More than one product.
  ExpectSumsOfBothStreams(50, 1100);  // In host memory three blocks of columns.
}

}  // namespace
}  // namespace marlin::device_products_test
