// Formats tables and quantities for people.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace marlin {

/// A text table: the first `left_columns` columns are left-aligned, the others right-aligned.
class Table {
 public:
  explicit Table(std::vector<std::string> header, size_t left_columns = 1);
  /// Precondition: as many cells as the header.
  void AddRow(std::vector<std::string> cells);
  /// Lines ending in newlines; the header is underlined.
  std::string ToString() const;

 private:
  std::vector<std::vector<std::string>> rows_;
  size_t left_columns_;
};

/// "46.70 B", "2.04 M", "913".
std::string FormatCount(int64_t count);
/// Every digit, in groups of three: "46,517".
std::string FormatInteger(int64_t count);
/// "46,517 tensors", "1 tensor".
std::string FormatCounted(int64_t count, std::string_view noun);
/// One decimal below 100, none from there on: "3.4", "43,077".
std::string FormatRate(double rate);
/// A fraction with one decimal: "10.9 %". Parts that would round to nothing or to the whole are
/// "< 0.1 %" and "> 99.9 %".
std::string FormatPercent(double fraction);
/// A relative change with one decimal and its sign: "+5.1 %".
std::string FormatChange(double fraction);
/// Powers of 1000: "23.42 GB", "512 B".
std::string FormatBytes(int64_t bytes);

}  // namespace marlin
