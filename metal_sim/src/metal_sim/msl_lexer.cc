// The lexer of preprocessed Metal source: one pass, no look-back.
#include "metal_sim/msl_lexer.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

namespace metal_sim {
namespace {

/// Longer ones first: the first that fits is taken.
constexpr std::array<std::string_view, 22> kLongPunctuators = {
    "...", "<<=", "->*", "::", "->", "<<", "<=", ">=", "==", "!=", "&&",
    "||",  "+=",  "-=",  "*=", "/=", "%=", "^=", "&=", "|=", "++", "--"};

/// Room is left to count on from the highest line that a marker may announce.
constexpr int kMaxLine = 1'000'000'000;
constexpr size_t kMaxBytes = 1'000'000'000;

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

bool IsIdentifierStart(char c) {
  // Bytes of UTF-8 sequences may stand in identifiers.
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (c & 0x80) != 0;
}

bool IsIdentifierPart(char c) { return IsIdentifierStart(c) || IsDigit(c); }

bool IsBlank(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\f' || c == '\v'; }

std::string_view TrimLeft(std::string_view text) {
  const auto first = std::find_if_not(text.begin(), text.end(), IsBlank);
  return text.substr(static_cast<size_t>(first - text.begin()));
}

class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) {}

  Result<std::vector<Token>> Run() {
    while (true) {
      METAL_SIM_RETURN_IF_ERROR(SkipSpace());
      if (position_ == text_.size()) return std::move(tokens_);
      METAL_SIM_RETURN_IF_ERROR(LexOne());
      line_start_ = false;
    }
  }

 private:
  /// The character `ahead` of the position; NUL past the end.
  char Peek(size_t ahead = 0) const {
    return position_ + ahead < text_.size() ? text_[position_ + ahead] : '\0';
  }

  bool StartsWith(std::string_view what) const {
    return text_.substr(position_, what.size()) == what;
  }

  Status Error(std::string_view message) const {
    return Status(Code::kInvalidArgument, fmt::format("{}:{}: {}", file_, line_, message));
  }

  void Advance(size_t count) {
    const std::string_view passed = text_.substr(position_, count);
    line_ += static_cast<int>(std::count(passed.begin(), passed.end(), '\n'));
    position_ += passed.size();
  }

  void Emit(TokenKind kind, size_t length) {
    tokens_.push_back({kind, text_.substr(position_, length), file_, line_});
    Advance(length);
  }

  /// Skips white space, comments and pragmas, and turns line markers into tokens.
  Status SkipSpace() {
    while (position_ < text_.size()) {
      const char c = Peek();
      if (c == '\n') {
        Advance(1);
        line_start_ = true;
      } else if (IsBlank(c)) {
        Advance(1);
      } else if (c == '\\' && Peek(1) == '\n') {
        Advance(2);
      } else if (StartsWith("//")) {
        Advance(std::min(text_.find('\n', position_), text_.size()) - position_);
      } else if (StartsWith("/*")) {
        const size_t end = text_.find("*/", position_ + 2);
        if (end == std::string_view::npos) return Error("a comment is not closed");
        Advance(end + 2 - position_);
      } else if (c == '#' && line_start_) {
        METAL_SIM_RETURN_IF_ERROR(LexDirective());
      } else {
        break;
      }
    }
    return Status();
  }

  /// `# 12 "file.metal" 2`, `#line 12 "file.metal"` or `#pragma ...`.
  Status LexDirective() {
    const size_t length = std::min(text_.find('\n', position_), text_.size()) - position_;
    std::string_view rest = TrimLeft(text_.substr(position_ + 1, length - 1));
    if (rest.starts_with("pragma")) {
      Advance(length);
      return Status();
    }
    if (rest.starts_with("line")) rest = TrimLeft(rest.substr(4));
    int line = 0;
    const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), line);
    if (error != std::errc() || line < 0 || line > kMaxLine) {
      return Error("a directive that is no line marker: the source must be preprocessed");
    }
    rest = TrimLeft(rest.substr(static_cast<size_t>(end - rest.data())));
    if (rest.starts_with('"')) {
      const size_t quote = rest.find('"', 1);
      if (quote == std::string_view::npos) return Error("the file of a line marker is not closed");
      file_ = rest.substr(1, quote - 1);
    }
    tokens_.push_back({TokenKind::kLineMarker, text_.substr(position_, length), file_, line});
    position_ += length;
    line_ = line - 1;  // The newline that ends the marker makes it `line`.
    return Status();
  }

  Status LexOne() {
    const char c = Peek();
    if (IsIdentifierStart(c)) return LexWord();
    if (IsDigit(c) || (c == '.' && IsDigit(Peek(1)))) {
      Emit(TokenKind::kNumber, NumberLength());
      return Status();
    }
    if (c == '"' || c == '\'') return LexQuoted(0);
    for (const std::string_view punctuator : kLongPunctuators) {
      if (StartsWith(punctuator)) {
        Emit(TokenKind::kPunctuator, punctuator.size());
        return Status();
      }
    }
    Emit(TokenKind::kPunctuator, 1);
    return Status();
  }

  /// An identifier, or a literal with a prefix.
  Status LexWord() {
    size_t length = 1;
    while (IsIdentifierPart(Peek(length))) ++length;
    const std::string_view word = text_.substr(position_, length);
    const char quote = Peek(length);
    const bool raw = word == "R" || word == "u8R" || word == "uR" || word == "UR" || word == "LR";
    if (raw && quote == '"') return LexRawString(length);
    const bool prefix = word == "u8" || word == "u" || word == "U" || word == "L";
    if (prefix && (quote == '"' || quote == '\'')) return LexQuoted(length);
    Emit(TokenKind::kIdentifier, length);
    return Status();
  }

  /// A preprocessing number: digits, letters, points, signs of exponents, separators.
  size_t NumberLength() const {
    size_t length = 1;
    while (true) {
      const char c = Peek(length);
      const char before = text_[position_ + length - 1];
      const bool exponent = before == 'e' || before == 'E' || before == 'p' || before == 'P';
      const bool sign = exponent && (c == '+' || c == '-');
      const bool separator = c == '\'' && IsIdentifierPart(Peek(length + 1));
      if (!IsIdentifierPart(c) && c != '.' && !sign && !separator) return length;
      ++length;
    }
  }

  /// A string or character literal whose quote stands `prefix` characters on.
  Status LexQuoted(size_t prefix) {
    const char quote = Peek(prefix);
    for (size_t length = prefix + 1; position_ + length < text_.size(); ++length) {
      const char c = Peek(length);
      if (c == '\n') break;
      if (c == '\\') {
        ++length;
      } else if (c == quote) {
        Emit(quote == '"' ? TokenKind::kString : TokenKind::kCharacter, length + 1);
        return Status();
      }
    }
    return Error("a literal is not closed");
  }

  /// R"delimiter(...)delimiter"
  Status LexRawString(size_t prefix) {
    const size_t start = position_ + prefix + 1;
    const size_t open = text_.find('(', start);
    if (open == std::string_view::npos) return Error("a raw string is not closed");
    const std::string close = fmt::format("){}\"", text_.substr(start, open - start));
    const size_t end = text_.find(close, open);
    if (end == std::string_view::npos) return Error("a raw string is not closed");
    Emit(TokenKind::kString, end + close.size() - position_);
    return Status();
  }

  std::string_view text_;
  size_t position_ = 0;
  std::string_view file_ = Token().file;
  int line_ = 1;
  bool line_start_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::string LocationOf(const Token& token) { return fmt::format("{}:{}", token.file, token.line); }

Result<std::vector<Token>> LexMetal(std::string_view text) {
  if (text.size() > kMaxBytes) {
    return Status(Code::kInvalidArgument,
                  fmt::format("the source has {} bytes, limit {}", text.size(), kMaxBytes));
  }
  return Lexer(text).Run();
}

}  // namespace metal_sim
