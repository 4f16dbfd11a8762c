// A tokenizer for tests.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/text_codec.h"

namespace marlin {

/// A token is a byte; tokens that are not printable decode to a letter, and bytes of incomplete
/// characters to U+FFFD.
class ByteCodec : public TextCodec {
 public:
  /// `start` is added to texts if special tokens are; negative: none.
  explicit ByteCodec(int32_t start = -1) : start_(start) {}
  Result<std::vector<int32_t>> Encode(std::string_view text, bool special) override {
    std::vector<int32_t> tokens;
    if (special && start_ >= 0) tokens.push_back(start_);
    for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
    return tokens;
  }
  Result<std::string> Decode(std::span<const int32_t> tokens) override {
    std::string text;
    for (size_t i = 0; i < tokens.size();) {
      const int32_t lead = tokens[i];
      if (lead == start_) {
        ++i;
        continue;
      }
      if (lead < 0x20 || lead > 0xF7) {
        text += static_cast<char>('a' + lead % 26);
        ++i;
        continue;
      }
      const size_t length = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
      if ((lead >= 0x80 && lead < 0xC0) || i + length > tokens.size()) {
        text += "\xEF\xBF\xBD";
        ++i;
        continue;
      }
      for (size_t j = 0; j < length; ++j) text += static_cast<char>(tokens[i++]);
    }
    return text;
  }

 private:
  int32_t start_;
};

}  // namespace marlin
