// Windows of joined columns are parts of what JoinColumns makes of the columns.
#include "layout/join_columns.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

namespace marlin::join_columns_test {
namespace {

/// Numbered elements as weights; `transposed` stores k contiguously.
struct Numbers {
  Numbers(int64_t k, int64_t n, bool transposed, uint16_t first)
      : elements(static_cast<size_t>(k * n)) {
    std::iota(elements.begin(), elements.end(), first);
    weights.spec = {.format = Format::kBf16, .k = k, .n = n, .group_size = k};
    const Shape shape{1, k, n};
    weights.codes = transposed ? TensorView(elements.data(), DType::kBf16, shape, {k * n, 1, k})
                               : TensorView(elements.data(), DType::kBf16, shape);
  }
  std::vector<uint16_t> elements;
  QuantizedWeights weights;
};

void ExpectWindowsOf(std::span<const WeightColumns> columns, const std::string& what) {
  const auto joined = JoinColumns(columns);
  ASSERT_TRUE(joined.ok()) << joined.status().message();
  const int64_t n = CountColumns(columns);
  ASSERT_EQ(joined->spec.n, n);
  const auto* const all = joined->codes.As<uint16_t>();
  for (const JoinedWindow& window : {JoinedWindow{0, joined->spec.k, 0, n},
                                     {2, 3, 0, n},
                                     {0, 1, n - 1, 1},
                                     {1, 4, 3, n - 5},
                                     {4, 2, 5, 1}}) {
    // Rows have two elements more than the window, which stay as they are.
    const int64_t stride = window.columns + 2;
    std::vector<uint16_t> copied(static_cast<size_t>(window.rows * stride), 7);
    CopyJoined(columns, &QuantizedWeights::codes, window, stride, copied.data());
    for (int64_t row = 0; row < window.rows; ++row) {
      for (int64_t column = 0; column < stride; ++column) {
        const int64_t from = (window.first_row + row) * n + window.first_column + column;
        EXPECT_EQ(copied[static_cast<size_t>(row * stride + column)],
                  column < window.columns ? all[from] : 7)
            << what << ": row " << row << ", column " << column;
      }
    }
  }
}

TEST(JoinColumnsTest, CopiesWindows) {
  const Numbers plain(6, 70, false, 100);
  const Numbers transposed(6, 70, true, 1000);
  const WeightColumns all{&plain.weights, 0, 1, 70};
  const WeightColumns even{&plain.weights, 0, 2, 35};
  const WeightColumns odd{&plain.weights, 1, 2, 35};
  const WeightColumns some{&transposed.weights, 3, 1, 40};
  const WeightColumns alternate{&transposed.weights, 1, 2, 30};
  const WeightColumns none{&plain.weights, 0, 1, 0};
  ExpectWindowsOf(std::vector{all}, "one matrix");
  ExpectWindowsOf(std::vector{even, odd}, "interleaved columns");
  ExpectWindowsOf(std::vector{all, none, some}, "a plain and a transposed matrix");
  ExpectWindowsOf(std::vector{alternate, some}, "transposed matrices");
}

TEST(JoinColumnsTest, JoinsInOrder) {
  const Numbers plain(2, 3, false, 10);      // 10 11 12, 13 14 15
  const Numbers transposed(2, 2, true, 20);  // 20 22, 21 23
  const std::vector<WeightColumns> columns = {
      {&plain.weights, 0, 2, 2}, {&transposed.weights, 1, 1, 1}, {&plain.weights, 1, 2, 1}};
  const auto joined = JoinColumns(columns);
  ASSERT_TRUE(joined.ok()) << joined.status().message();
  const auto* const codes = joined->codes.As<uint16_t>();
  EXPECT_EQ(std::vector<uint16_t>(codes, codes + 8),
            (std::vector<uint16_t>{10, 12, 22, 11, 13, 15, 23, 14}));
}

}  // namespace
}  // namespace marlin::join_columns_test
