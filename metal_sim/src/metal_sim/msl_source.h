// A Metal source as tokens that can be replaced one by one: attributes set apart, brackets paired,
// every line where it was. Owns how text is read and printed; knows nothing of kernels.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "metal_sim/msl_lexer.h"

namespace metal_sim {

/// One attribute of a `[[...]]` list: `name` or `name(arguments)`.
struct Attribute {
  std::string name;  ///< With its namespace: `clang::noinline`.
  std::vector<Token> arguments;
  Token where;
  size_t before;  ///< The index of the token that follows the list.
};

/// The value of an attribute's argument that is an integer literal, or a sum of some, as macros
/// for the first of several indices leave; nothing for other expressions.
std::optional<int> IntegerOf(std::span<const Token> arguments);

/// The number of no token.
inline constexpr size_t kNoToken = static_cast<size_t>(-1);

/// Tokens are numbered from 0; attributes and line markers are not among them.
class MslSource {
 public:
  /// Reads `text`, which must outlive the source. Errors: kInvalidArgument for text that cannot
  /// be split into tokens and for brackets without a partner.
  static Result<MslSource> Parse(std::string_view text);

  size_t size() const { return code_.size(); }
  /// The token at `index`; outside of the source one of kind kEnd without text.
  const Token& At(size_t index) const;
  std::string_view Text(size_t index) const { return At(index).text; }
  bool IsIdentifier(size_t index) const { return At(index).kind == TokenKind::kIdentifier; }
  /// Whether the token is this identifier or punctuator.
  bool Is(size_t index, std::string_view text) const;
  bool IsOneOf(size_t index, std::initializer_list<std::string_view> texts) const;
  /// device, constant, thread or threadgroup.
  bool IsAddressSpace(size_t index) const;

  /// The partner of the bracket ( ) [ ] { } at `index`; `index` itself for any other token, so
  /// that `i = Partner(i)` steps over bracketed tokens.
  size_t Partner(size_t index) const;
  /// The `>` in front of `end` that closes the `<` at `open` if that opens template arguments;
  /// kNoToken if there is none.
  size_t ClosingAngle(size_t open, size_t end) const;
  /// The opening bracket around each token, kNoToken at the outermost level.
  size_t Enclosing(size_t index) const { return index < size() ? enclosing_[index] : kNoToken; }

  /// The attributes in front of the tokens `first` to `last`, both included.
  std::span<const Attribute> Attributes(size_t first, size_t last) const;

  /// The tokens [first, end) in one line, spaced the same however the source spaces them.
  std::string Spell(size_t first, size_t end) const;

  /// "file.metal:12" of a token; of the last one for an index past it.
  std::string Location(size_t index) const;
  /// kInvalidArgument: "file.metal:12: message".
  Status Error(size_t index, std::string_view message) const;

  void Replace(size_t index, std::string text);
  void Blank(size_t first, size_t end);

  /// The source without attributes, with the replacements, and with `#line` for line markers.
  /// Every newline is kept, so tokens stay on the lines where they were.
  std::string Print() const;

 private:
  struct Item {
    Token token;
    std::optional<std::string> replacement;
  };

  void SetAttributesApart();
  Status PairBrackets();
  void PairAngles();

  std::string_view text_;
  std::vector<Item> items_;   // All tokens of the text.
  std::vector<size_t> code_;  // The items that are neither markers nor parts of attributes.
  std::vector<size_t> partner_;
  std::vector<size_t> enclosing_;
  std::vector<size_t> closing_angle_;
  std::vector<Attribute> attributes_;  // In the order of the text.
};

/// Tokens [first, end).
struct TokenRange {
  size_t first;
  size_t end;
};

}  // namespace metal_sim
