// How the BPE tokenizers of GGUF files cut texts, by tokenizer.ggml.pre.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace marlin {

/// How a text is cut into pieces before the merges of a BPE.
struct GgufCut {
  /// In turn, each within the pieces of earlier ones; what no match covers is a piece, too.
  std::vector<std::string> patterns;
  bool whole_words = false;  ///< A piece that is a token is not merged from parts.
  bool composed = false;     ///< The text is first brought to Unicode's NFC.
  /// Merges join characters, and bytes only where a character is no token; otherwise all are bytes.
  bool characters = false;
  bool marks_spaces = false;  ///< Spaces become U+2581; only with `characters`.

  friend bool operator==(const GgufCut&, const GgufCut&) = default;
};

/// The pattern of GPT-2, which tokenizers have built in.
std::string_view Gpt2Pattern();

/// The cut of a value of tokenizer.ggml.pre, "default" for an empty one; nothing for an unknown
/// one.
std::optional<GgufCut> GgufCutOf(std::string_view pre);

/// Whether a BOS token stands before texts where tokenizer.ggml.add_bos_token is missing.
bool GgufCutAddsBos(std::string_view pre);

/// The value of tokenizer.ggml.pre that most programs know for a cut; empty if there is none.
std::string_view GgufCutName(const GgufCut& cut);

}  // namespace marlin
