// How byte-level tokenizers of GGUF files cut texts, by tokenizer.ggml.pre.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace marlin {

/// How a text is cut into pieces before the merges of a byte-level BPE.
struct GgufCut {
  /// In turn, each within the pieces of the ones before; none: the pattern of GPT-2.
  std::vector<std::string> patterns;
  bool whole_words = false;  ///< A piece that is a token is not merged from parts.
  bool composed = false;     ///< The text is first brought to Unicode's NFC.

  friend bool operator==(const GgufCut&, const GgufCut&) = default;
};

/// The cut of a value of tokenizer.ggml.pre; nothing for an unknown one.
std::optional<GgufCut> GgufCutOf(std::string_view pre);

/// One value for every known cut.
std::span<const std::string_view> GgufCutNames();

}  // namespace marlin
