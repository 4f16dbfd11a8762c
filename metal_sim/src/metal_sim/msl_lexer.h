// Splits preprocessed Metal source into tokens that know their place in the .metal file. Owns what
// a token is; knows nothing of declarations, attributes or kernels.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "metal_sim/status.h"

namespace metal_sim {

enum class TokenKind : uint8_t {
  kEnd,  ///< Stands before the first and after the last token.
  kIdentifier,
  kNumber,
  kString,     ///< With its prefix and quotes; raw strings too.
  kCharacter,  ///< With its prefix and quotes.
  kPunctuator,
  kLineMarker,  ///< A whole line: `# 12 "file.metal" 2`; it announces `line` and `file`.
};

/// A token. `text` and `file` point into the lexed text.
struct Token {
  TokenKind kind = TokenKind::kEnd;
  std::string_view text;
  std::string_view file = "<source>";  ///< As spelled in the line marker, without quotes.
  int line = 1;
};

/// Returns "file.metal:12".
std::string LocationOf(const Token& token);

/// Splits `text`, the output of a preprocessor; it must outlive the tokens. White space, comments
/// and #pragma lines are between tokens. Every `>` that could close a template's arguments is a
/// token of its own: `>>` is two tokens and `>>=` is `>` and `>=`.
/// Errors: kInvalidArgument for literals and comments that do not end and for other directives.
Result<std::vector<Token>> LexMetal(std::string_view text);

}  // namespace metal_sim
