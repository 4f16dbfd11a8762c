// Outputs that are periodic along m and n because the operands are: checking one period against the
// reference, and periodicity, validates an output of any size.
#pragma once

#include <cstdint>
#include <string>

#include "marlin/tensor.h"

namespace marlin::conformance {

/// Rows of `columns` elements, `stride` apart, that repeat every `row_period` and `column_period`.
struct PeriodicOutput {
  const std::byte* data = nullptr;
  DType type = DType::kF32;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;
  int64_t row_period = 0;
  int64_t column_period = 0;
};

/// Returns empty, or a message about the first element that differs from the one of the first
/// period. The sign of zero is ignored.
std::string FindAperiodic(const PeriodicOutput& output);

}  // namespace marlin::conformance
