// Formats tables and quantities for people.
#pragma once

#include <cstdint>
#include <string>
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
/// Powers of 1000: "23.42 GB", "512 B".
std::string FormatBytes(int64_t bytes);

}  // namespace marlin
