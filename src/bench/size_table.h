// Tables of measurements over sizes, for people.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bench/gemm.h"
#include "bench/timer.h"

namespace marlin::bench {

/// One measurement: a row of the table of its matrix.
struct SizeRow {
  std::string matrix;  ///< Heads the table: "n=4096 k=4096".
  int64_t m = 1;
  std::string weights;  ///< "fp4_e2m1", "fp4_e2m1 2:4".
  std::string kernel;   ///< Listed below the table; empty: not listed.
  Timing timing;
  std::optional<Timing> chain;   ///< Back-to-back, on a GPU.
  std::optional<double> active;  ///< Experts that any token selects.
  double bytes = 0;              ///< Bytes of the weights.
  double operations = 0;         ///< FLOP; 0: not counted.
  double fraction = 0;           ///< The roofline time over the measured time.
  std::vector<BaselineTiming> peers;
};

/// One table for each matrix, in the order of their first rows. A table has a line for every m, in
/// ascending order, and weights; `size` heads the column of m, which is left out if that is empty.
/// Columns: microseconds, spread (10 to 90 % over the median), GB/s, TFLOP/s, roofline and, for
/// each peer, its microseconds and how many times slower it is.
std::string SizeTables(std::span<const SizeRow> rows, const std::string& size);

/// "12.34", "1234.5", "123456": microseconds with as many decimals as matter.
std::string MicrosecondsText(double seconds);

}  // namespace marlin::bench
