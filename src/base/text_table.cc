#include "base/text_table.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "base/printable.h"

namespace marlin {
namespace {

/// Formats value with two decimals and the largest unit (powers of 1000) that it reaches.
std::string FormatScaled(int64_t value, const std::array<const char*, 5>& units) {
  double scaled = static_cast<double>(value);
  size_t unit = 0;
  // 999,995 would print as "1000.00": the next unit starts at the value that rounds to it.
  while (unit + 1 < units.size() && scaled >= (unit == 0 ? 1000.0 : 999.995)) {
    scaled /= 1000.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{}{}", value, units[0])
                   : fmt::format("{:.2f}{}", scaled, units[unit]);
}

}  // namespace

Table::Table(std::vector<std::string> header, size_t left_columns) : left_columns_(left_columns) {
  rows_.push_back(std::move(header));
}

void Table::AddRow(std::vector<std::string> cells) {
  for (std::string& cell : cells) cell = EscapeUnprintable(cell);
  rows_.push_back(std::move(cells));
}

std::string Table::ToString() const {
  std::vector<size_t> widths(rows_.front().size(), 0);
  for (const auto& row : rows_) {
    for (size_t i = 0; i < widths.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  const auto append = [&](const std::vector<std::string>& row) {
    std::string line;
    for (size_t i = 0; i < widths.size(); ++i) {
      line += i == 0 ? "" : "  ";
      line += i < left_columns_ ? fmt::format("{:<{}}", row[i], widths[i])
                                : fmt::format("{:>{}}", row[i], widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  };
  for (size_t r = 0; r < rows_.size(); ++r) {
    append(rows_[r]);
    if (r > 0) continue;
    std::vector<std::string> rule;
    rule.reserve(widths.size());
    for (size_t width : widths) rule.emplace_back(width, '-');
    append(rule);
  }
  return text;
}

std::string FormatCount(int64_t count) { return FormatScaled(count, {"", " K", " M", " B", " T"}); }

std::string FormatInteger(int64_t count) {
  std::string digits = std::to_string(count);
  const size_t first = count < 0 ? 1 : 0;
  for (size_t at = digits.size(); at > first + 3;) digits.insert(at -= 3, 1, ',');
  return digits;
}

std::string FormatCounted(int64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", FormatInteger(count), noun, count == 1 ? "" : "s");
}

std::string FormatRate(double rate) {
  return rate < 99.95 ? fmt::format("{:.1f}", rate) : FormatInteger(std::llround(rate));
}

std::string FormatPercent(double fraction) {
  if (fraction > 0 && fraction < 0.0005) return "< 0.1 %";
  if (fraction < 1 && fraction >= 0.9995) return "> 99.9 %";
  return fmt::format("{:.1f} %", 100 * fraction);
}

std::string FormatChange(double fraction) { return fmt::format("{:+.1f} %", 100 * fraction); }

std::string FormatBytes(int64_t bytes) {
  return FormatScaled(bytes, {" B", " kB", " MB", " GB", " TB"});
}

}  // namespace marlin
