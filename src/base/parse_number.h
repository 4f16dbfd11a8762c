// Strict number parsing: the whole text, independent of the process's locale.
#pragma once

#include <charconv>
#include <locale>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>

namespace marlin {

/// Whether all of `text` is a number; `*value` is set only then. Integers out of range are not
/// numbers.
template <typename T>
bool ParseNumber(std::string_view text, T* value) {
  T number{};
  if constexpr (std::is_integral_v<T>) {
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, number);
    if (error != std::errc() || stop != end || text.empty()) return false;
  } else {
    // libc++ (macOS) implements from_chars for integers only.
    std::istringstream stream{std::string(text)};
    stream.imbue(std::locale::classic());
    if (!(stream >> std::noskipws >> number) || stream.peek() != std::char_traits<char>::eof()) {
      return false;
    }
  }
  *value = number;
  return true;
}

}  // namespace marlin
