#include "metal_sim/msl_expressions.h"

#include <fmt/core.h>

#include <optional>
#include <string>
#include <string_view>

#include "metal_sim/msl_declarations.h"
#include "metal_sim/msl_vector_names.h"

namespace metal_sim {
namespace {

bool HasPrefix(std::string_view text, char upper) {
  return text.size() > 1 && text[0] == '0' && (text[1] | 0x20) == (upper | 0x20);
}

/// Where the suffix of a half or bfloat literal begins; kNoToken for other literals. Digits of
/// hexadecimal integers look like bf; only after an exponent are these letters not digits.
size_t SuffixStart(std::string_view literal) {
  const bool hexadecimal = HasPrefix(literal, 'X');
  if (hexadecimal && literal.find_first_of("pP") == std::string_view::npos) return kNoToken;
  if (literal.ends_with('h') || literal.ends_with('H')) return literal.size() - 1;
  if (literal.ends_with("bf") || literal.ends_with("BF")) return literal.size() - 2;
  return kNoToken;
}

/// Whether it is a floating literal without a suffix.
bool IsFloating(std::string_view literal) {
  const bool hexadecimal = HasPrefix(literal, 'X');
  const char last = literal.back();
  const bool digit = last == '.' || (last >= '0' && last <= '9');
  return digit && literal.find_first_of(hexadecimal ? "pP" : ".eE") != std::string_view::npos;
}

class ExpressionRewriter {
 public:
  ExpressionRewriter(MslSource& source, RewritePurpose purpose)
      : source_(source), vectors_(source), runs_(purpose == RewritePurpose::kRun) {}

  void Run() {
    for (size_t i = 0; i < source_.size(); ++i) {
      const TokenKind kind = source_.At(i).kind;
      if (kind == TokenKind::kNumber) RewriteLiteral(i);
      if (runs_ && source_.Text(i) == "0" && IsBranch(i)) source_.Replace(i, "::metal_sim::kZero");
      if (vectors_.IsVector(i)) RewriteBraces(i);
      if (!runs_ || source_.Is(i - 1, "operator")) continue;
      if (kind == TokenKind::kPunctuator) RewriteOperator(i);
      if (source_.Is(i, "auto")) RewriteAuto(i);
    }
  }

 private:
  void RewriteLiteral(size_t index) {
    const std::string_view literal = source_.Text(index);
    const size_t start = SuffixStart(literal);
    if (start == kNoToken) {
      // clang's option for single precision forgets literals of templates.
      if (runs_ && IsFloating(literal)) source_.Replace(index, fmt::format("{}f", literal));
      return;
    }
    const std::string_view digits = literal.substr(0, start);
    const bool is_half = literal.size() - start == 1;
    if (is_half) {
      source_.Replace(index, fmt::format("{}h", digits));
    } else if (runs_) {
      source_.Replace(index, fmt::format("{}_bf", digits));
    } else {
      source_.Replace(index, fmt::format("bfloat({})", digits));
    }
  }

  /// Whether a number is, alone, one side of ?: whose other side is not.
  bool IsBranch(size_t index) const {
    if (source_.Is(index - 1, "?")) {
      const bool other = source_.At(index + 2).kind == TokenKind::kNumber;
      return source_.Is(index + 1, ":") && !other;
    }
    const bool ends = source_.IsOneOf(index + 1, {";", ")", ",", "]", "}"});
    return ends && source_.Is(index - 1, ":") && BeginsBranch(index - 1) &&
           source_.At(index - 2).kind != TokenKind::kNumber;
  }

  /// Whether the colon belongs to a question mark in front of it.
  bool BeginsBranch(size_t colon) const {
    int open = 1;
    for (size_t i = colon; i-- > 0;) {
      if (source_.Partner(i) < i) {
        i = source_.Partner(i);
        continue;
      }
      if (source_.Is(i, ":")) ++open;
      if (source_.Is(i, "?") && --open == 0) return true;
      if (source_.IsOneOf(i, {";", "{", "(", "[", ","})) return false;
    }
    return false;
  }

  /// Whether the token follows the previous token without a gap.
  bool Touches(size_t index) const {
    const std::string_view before = source_.Text(index - 1);
    return before.data() + before.size() == source_.Text(index).data();
  }

  /// Whether `>` at `index` ends template arguments.
  bool IsClosingAngle(size_t index) const {
    for (size_t open = index; open-- > 0;) {
      if (source_.Is(open, "<") && source_.ClosingAngle(open, source_.size()) == index) return true;
      if (source_.Is(open, ";") || source_.Partner(open) > index) break;
    }
    return false;
  }

  bool IsShiftRight(size_t index) const {
    const bool two = source_.Is(index + 1, ">") || source_.Is(index + 1, ">=");
    return source_.Is(index, ">") && two && Touches(index + 1) && !IsClosingAngle(index);
  }

  void RewriteOperator(size_t index) {
    if (source_.Is(index, "<<")) {
      source_.Replace(index, "<< ::metal_sim::kLeftShift <<");
    } else if (source_.Is(index, "<<=")) {
      source_.Replace(index, "<<= ::metal_sim::kLeftShift =");
    } else if (source_.Is(index, "/") || source_.Is(index, "%")) {
      source_.Replace(index, fmt::format("{0} ::metal_sim::{1} {0}", source_.Text(index),
                                         MarkerOf(source_.Text(index)[0])));
    } else if (source_.Is(index, "/=") || source_.Is(index, "%=")) {
      source_.Replace(index, fmt::format("{} ::metal_sim::{} =", source_.Text(index),
                                         MarkerOf(source_.Text(index)[0])));
    } else if (IsShiftRight(index)) {
      const bool assigns = source_.Is(index + 1, ">=");
      source_.Blank(index, index + 2);
      source_.Replace(
          index, assigns ? ">>= ::metal_sim::kRightShift =" : "<< ::metal_sim::kRightShift <<");
    }
  }

  static std::string_view MarkerOf(char operation) {
    return operation == '/' ? "kDivision" : "kRemaindering";
  }

  /// `auto x = e`, and not `auto& x = e`, lambdas or lists; at namespace scope constants have types
  /// of their own.
  void RewriteAuto(size_t index) {
    const size_t around = source_.Enclosing(index);
    if (around == kNoToken || (source_.Is(around, "{") && !InBody(index))) return;
    size_t name = index + 1;
    if (source_.Is(name, "const")) ++name;
    const bool plain = source_.IsIdentifier(name) && source_.Is(name + 1, "=") &&
                       !source_.Is(name + 2, "[") && !source_.Is(name + 2, "{");
    if (plain) source_.Replace(name + 1, "= ::metal_sim::kAutoValue =");
  }

  /// `float4 v = {x, y}` and arrays of them: a list of braces may hold fewer numbers than the
  /// vector.
  void RewriteBraces(size_t index) {
    const size_t name = vectors_.TypeEnd(index);
    if (!source_.IsIdentifier(name)) return;
    size_t open = name + 1;
    int dimensions = 0;
    for (; source_.Is(open, "["); open = source_.Partner(open) + 1) ++dimensions;
    const bool assigns = source_.Is(open, "=");
    if (assigns) ++open;
    if (!source_.Is(open, "{")) return;
    if (runs_) {
      MarkLists(open, dimensions, "{::metal_sim::Braces()", "");
    } else if (InBody(index) && (assigns || dimensions > 0)) {
      const std::string type = source_.Spell(index, name);
      MarkLists(open, dimensions, fmt::format("::metal_sim::Listed<{}>(0", type), ")");
    }
  }

  /// Whether it is in a function; variables outside of one must be constants.
  bool InBody(size_t index) const {
    const size_t around = source_.Enclosing(index);
    return around != kNoToken && source_.Is(around, "{") &&
           KindOfBrace(source_, around) == BraceKind::kBody;
  }

  /// Replaces the braces of the lists `depth` levels inside of the one at `open`. `first` ends with
  /// an operand; an empty `last` leaves the closing brace.
  void MarkLists(size_t open, int depth, const std::string& first, const std::string& last) {
    const size_t close = source_.Partner(open);
    if (depth == 0) {
      source_.Replace(open, close == open + 1 ? first : first + ",");
      if (!last.empty()) source_.Replace(close, last);
      return;
    }
    for (size_t i = open + 1; i < close; i = source_.Partner(i) + 1) {
      if (source_.Is(i, "{")) MarkLists(i, depth - 1, first, last);
    }
  }

  MslSource& source_;
  const VectorNames vectors_;
  const bool runs_;
};

}  // namespace

void RewriteExpressions(MslSource& source, RewritePurpose purpose) {
  ExpressionRewriter(source, purpose).Run();
}

}  // namespace metal_sim
