#include "periodic.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "reference/elements.h"

namespace marlin::conformance {
namespace {

std::string Compare(const PeriodicOutput& output, int64_t row, const std::byte* got,
                    const std::byte* expected) {
  for (int64_t n = 0; n < output.columns; ++n) {
    const double value = reference::LoadElement(got, output.type, n);
    const double first = reference::LoadElement(expected, output.type, n);
    if (value == first) continue;
    return fmt::format("[{}, {}]: got {:.9g}, but [{}, {}] is {:.9g}", row, n, value,
                       row % output.row_period, n % output.column_period, first);
  }
  return {};
}

}  // namespace

std::string FindAperiodic(const PeriodicOutput& output) {
  const int64_t bytes = DTypeBytes(output.type);
  const auto row_bytes = static_cast<size_t>(output.columns * bytes);
  const auto period = static_cast<size_t>(output.column_period * bytes);
  std::vector<std::byte> expected(row_bytes);
  for (int64_t m = 0; m < output.rows; ++m) {
    const std::byte* got = output.data + m * output.stride * bytes;
    const std::byte* first = output.data + m % output.row_period * output.stride * bytes;
    for (size_t at = 0; at < row_bytes; at += period) {
      std::memcpy(expected.data() + at, first, std::min(period, row_bytes - at));
    }
    if (std::memcmp(got, expected.data(), row_bytes) == 0) continue;
    const std::string difference = Compare(output, m, got, expected.data());
    if (!difference.empty()) return difference;
  }
  return {};
}

}  // namespace marlin::conformance
