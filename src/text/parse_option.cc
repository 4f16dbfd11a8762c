#include "text/parse_option.h"

#include <fmt/core.h>

#include <charconv>
#include <string_view>
#include <system_error>

#include "base/checked.h"
#include "base/errors.h"
#include "base/parse_number.h"

namespace marlin {
namespace {

/// `kind` is "a whole number" or "a number", for text that is not a number at all.
Status WrongNumber(const char* option, const char* kind, const std::string& range,
                   const std::string& text, bool is_number) {
  if (is_number) {
    return Invalid(fmt::format("{}: expected {}, got {}", option, range, text));
  }
  constexpr size_t kShownCharacters = 40;
  const bool whole = text.size() <= kShownCharacters;
  return Invalid(fmt::format("{}: expected {}, {}, got '{}'{}", option, kind, range,
                             text.substr(0, kShownCharacters), whole ? "" : " and more"));
}

}  // namespace

Result<int64_t> ParseOption(const char* option, const std::string& text, const WholeRange& range) {
  int64_t number = 0;
  const bool is_number = ParseNumber(text, &number);
  if (is_number && number >= range.least && number <= range.most) return number;
  const std::string expected = range.most == INT64_MAX
                                   ? fmt::format("{} or more", range.least)
                                   : fmt::format("{}..{}", range.least, range.most);
  return WrongNumber(option, "a whole number", expected, text, is_number);
}

Result<double> ParseOption(const char* option, const std::string& text, const RealRange& range) {
  double number = 0;
  // Some standard libraries also parse hexadecimal digits and names such as nan.
  const bool is_number =
      text.find_first_not_of("0123456789+-.eE") == std::string::npos && ParseNumber(text, &number);
  const bool enough = range.without_least ? number > range.least : number >= range.least;
  if (is_number && enough && number <= range.most) return number;
  const bool open = range.most == std::numeric_limits<double>::max();
  const std::string expected =
      range.without_least
          ? fmt::format("more than {}{}", range.least,
                        open ? "" : fmt::format(" and at most {}", range.most))
          : fmt::format("{}{}", range.least, open ? " or more" : fmt::format("..{}", range.most));
  return WrongNumber(option, "a number", expected, text, is_number);
}

Result<int64_t> ParseByteSize(const char* option, const std::string& text) {
  struct Unit {
    std::string_view name;
    int64_t bytes;
  };
  constexpr Unit kUnits[] = {
      {"", 1},
      {"B", 1},
      {"kB", 1000},
      {"KB", 1000},
      {"MB", 1000 * 1000},
      {"GB", 1000 * 1000 * 1000},
      {"TB", int64_t{1000} * 1000 * 1000 * 1000},
      {"KiB", 1 << 10},
      {"MiB", 1 << 20},
      {"GiB", 1 << 30},
      {"TiB", int64_t{1} << 40},
  };
  int64_t number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  const std::string_view unit_name(stop, static_cast<size_t>(end - stop));
  for (const Unit& unit : kUnits) {
    if (error != std::errc() || unit.name != unit_name) continue;
    const auto bytes = (Checked(number) * Checked(unit.bytes)).Take();
    if (bytes && *bytes > 0) return *bytes;
  }
  return Invalid(fmt::format("{}: expected a size such as 5GB, got '{}'", option, text));
}

}  // namespace marlin
