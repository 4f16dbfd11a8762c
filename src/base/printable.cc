#include "base/printable.h"

#include <algorithm>
#include <cstdint>

namespace marlin {
namespace {

struct CodePoint {
  uint32_t value = 0;
  size_t bytes = 1;
  bool valid = false;
};

uint8_t ByteAt(std::string_view text, size_t at) { return static_cast<uint8_t>(text[at]); }

// Decodes the character at `at`. Overlong forms, surrogates, code points above U+10FFFF and stray
// continuation bytes are invalid.
CodePoint Decode(std::string_view text, size_t at) {
  const uint8_t first = ByteAt(text, at);
  if (first < 0x80) return {first, 1, true};
  if (first < 0xc2 || first > 0xf4) return {};
  size_t bytes = 2;
  if (first >= 0xe0) bytes = first < 0xf0 ? 3 : 4;
  if (text.size() - at < bytes) return {};
  uint32_t value = first & (0x7fu >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    const uint8_t next = ByteAt(text, at + i);
    if ((next & 0xc0u) != 0x80u) return {};
    value = value << 6 | (next & 0x3fu);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  if (value < kLeast[bytes] || value > 0x10ffff) return {};
  if (value >= 0xd800 && value <= 0xdfff) return {};
  return {value, bytes, true};
}

bool IsPrintable(uint32_t c) {
  if (c < 0x20 || (c >= 0x7f && c <= 0x9f)) return false;
  if (c == 0x061c || c == 0x200e || c == 0x200f) return false;
  return (c < 0x2028 || c > 0x202e) && (c < 0x2066 || c > 0x2069);
}

bool IsPlainAscii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= 0x20 && c < 0x7f; });
}

void AppendEscaped(std::string_view bytes, std::string* out) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  for (const char c : bytes) {
    const auto byte = static_cast<uint8_t>(c);
    *out += "\\x";
    *out += kDigits[byte >> 4];
    *out += kDigits[byte & 0xf];
  }
}

std::string Escape(std::string_view text, Layout layout, size_t max_bytes) {
  std::string out;
  out.reserve(std::min(text.size(), max_bytes));
  std::string escaped;
  for (size_t at = 0; at < text.size();) {
    const CodePoint c = Decode(text, at);
    std::string_view shown = text.substr(at, c.bytes);
    const bool is_layout = layout == Layout::kKept && (c.value == '\n' || c.value == '\t');
    if (!c.valid || !(IsPrintable(c.value) || is_layout)) {
      escaped.clear();
      AppendEscaped(shown, &escaped);
      shown = escaped;
    }
    if (shown.size() > max_bytes - out.size()) return out + "...";
    out += shown;
    at += c.bytes;
  }
  return out;
}

}  // namespace

std::string EscapeUnprintable(std::string_view text, Layout layout) {
  if (IsPlainAscii(text)) return std::string(text);
  return Escape(text, layout, std::string::npos);
}

std::string Printable(std::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes && IsPlainAscii(text)) return std::string(text);
  return Escape(text, Layout::kOneLine, max_bytes);
}

}  // namespace marlin
