#include "metal_sim/msl_overloads.h"

#include <algorithm>
#include <map>
#include <vector>

#include "metal_sim/msl_declarations.h"
#include "metal_sim/msl_source.h"

namespace metal_sim {
namespace {

/// Depth of nested namespaces and types; deeper ones are left alone.
constexpr int kMaxDepth = 100;

class OverloadFinder {
 public:
  explicit OverloadFinder(const MslSource& source) : source_(source) {}

  /// The ranges to remove.
  std::vector<TokenRange> Run() {
    Walk({0, source_.size()}, "");
    return std::move(removed_);
  }

 private:
  /// The qualifiers after the parameters of a function.
  struct Qualifiers {
    std::vector<size_t> spaces;
    bool is_const = false;
    size_t end = 0;
  };

  /// The declarations of a namespace or type.
  void Walk(TokenRange range, const std::string& scope) {
    if (++depth_ <= kMaxDepth) {
      for (size_t i = range.first; i < range.end;) i = Declaration(i, range.end, scope);
    }
    --depth_;
  }

  /// Reads one; returns where the next one starts.
  size_t Declaration(size_t start, size_t end, const std::string& scope) {
    if (source_.IsOneOf(start, {"public", "private", "protected"})) return start + 2;
    size_t i = start;
    while (source_.Is(i, "template") && source_.Is(i + 1, "<")) {
      const size_t close = source_.ClosingAngle(i + 1, end);
      if (close == kNoToken) return end;  // A later pass reports the error.
      i = close + 1;
    }
    for (; i < end && !source_.Is(i, ";"); i = source_.Partner(i) + 1) {
      if (source_.Is(i, "=")) return Behind(i, end, {";"});
      if (source_.Is(i, "{")) return Braces(start, i, scope);
      if (source_.Is(i, "operator")) i = OperatorParameters(i);
      if (source_.Is(i, "(") && !TakesParentheses(i - 1)) return Add(start, i, end, scope);
      const size_t angle = source_.Is(i, "<") ? source_.ClosingAngle(i, end) : kNoToken;
      if (angle != kNoToken) i = angle;
    }
    return i + 1;
  }

  size_t Braces(size_t start, size_t open, const std::string& scope) {
    const size_t close = source_.Partner(open);
    const BraceKind kind = KindOfBrace(source_, open);
    if (kind == BraceKind::kNamespace) {
      Walk({open + 1, close}, scope + source_.Spell(start, open) + "::");
    } else if (kind == BraceKind::kType && IsRepeated({start, open}, {}, scope)) {
      removed_.push_back({start, close + 1});
    } else if (kind == BraceKind::kType) {
      Walk({open + 1, close}, std::to_string(open) + "::");
    }
    return close + 1;
  }

  bool TakesParentheses(size_t index) const {
    return source_.IsOneOf(index, {"alignas", "__attribute__", "decltype", "noexcept"});
  }

  /// The parenthesis after `operator()`, `operator==` or `operator vec<T, 2>`.
  size_t OperatorParameters(size_t index) const {
    size_t open = index + 1;
    if (source_.Is(open, "(")) open = source_.Partner(open) + 1;
    while (open < source_.size() && !source_.Is(open, "(")) ++open;
    return open;
  }

  /// Past the next of some tokens at this level.
  size_t Behind(size_t index, size_t end, std::initializer_list<std::string_view> words) const {
    while (index < end && !source_.IsOneOf(index, words)) index = source_.Partner(index) + 1;
    return index + 1;
  }

  size_t Add(size_t start, size_t open, size_t end, const std::string& scope) {
    Qualifiers after;
    for (after.end = source_.Partner(open) + 1;; ++after.end) {
      if (source_.IsAddressSpace(after.end)) {
        after.spaces.push_back(after.end);
      } else if (source_.Is(after.end, "const")) {
        after.is_const = true;
      } else if (!source_.Is(after.end, "volatile")) {
        break;
      }
    }
    const size_t last = LastToken(after.end, end);
    const bool decided = source_.Is(last, "}") || !after.spaces.empty();
    const TokenRange head = {start, source_.Partner(open) + 1};
    if (decided && IsRepeated(head, after.spaces, after.is_const ? scope + "const " : scope)) {
      removed_.push_back({start, last + 1});
    } else {
      for (const size_t space : after.spaces) removed_.push_back({space, space + 1});
    }
    return last + 1;
  }

  /// The brace that closes the body, or the `;` of a declaration.
  size_t LastToken(size_t after, size_t end) const {
    size_t i = after;
    if (source_.Is(i, ":")) {  // Members and bases, each with parentheses or braces of its own.
      do {
        for (++i; i < end && !source_.Is(i, "(") && !source_.Is(i, "{");) {
          const size_t angle = source_.Is(i, "<") ? source_.ClosingAngle(i, end) : kNoToken;
          i = angle == kNoToken ? i + 1 : angle + 1;
        }
        i = source_.Partner(i) + 1;
      } while (i < end && source_.Is(i, ","));
    }
    while (i < end && !source_.Is(i, ";") && !source_.Is(i, "{")) i = source_.Partner(i) + 1;
    return std::min(source_.Is(i, "{") ? source_.Partner(i) : i, source_.size() - 1);
  }

  /// Whether there was a function or a specialisation of a type that differs in address spaces, of
  /// its tokens or those at `spaces`, and in nothing else.
  bool IsRepeated(TokenRange head, const std::vector<size_t>& spaces, const std::string& scope) {
    std::string spaced = scope;
    std::string plain = scope;
    const auto append = [&](size_t index) {
      spaced.append(source_.Text(index)).append(" ");
      if (!source_.IsAddressSpace(index)) plain.append(source_.Text(index)).append(" ");
    };
    for (size_t i = head.first; i < head.end; ++i) append(i);
    for (const size_t space : spaces) append(space);
    const auto [first, added] = first_of_.emplace(plain, spaced);
    return !added && first->second != spaced;
  }

  const MslSource& source_;
  int depth_ = 0;
  /// The first spelling with address spaces, by the one without.
  std::map<std::string, std::string> first_of_;
  std::vector<TokenRange> removed_;
};

/// Makes [begin, end) spaces except newlines and line markers.
void Erase(std::string& text, size_t begin, size_t end) {
  bool marker = false;
  for (size_t i = begin; i < end; ++i) {
    if (i == 0 || text[i - 1] == '\n') marker = text[i] == '#';
    if (text[i] != '\n' && !marker) text[i] = ' ';
  }
}

}  // namespace

Result<std::string> MergeOverloads(std::string_view preprocessed) {
  METAL_SIM_ASSIGN_OR_RETURN(const MslSource source, MslSource::Parse(preprocessed));
  std::string merged(preprocessed);
  for (const TokenRange& range : OverloadFinder(source).Run()) {
    const std::string_view first = source.Text(range.first);
    const std::string_view last = source.Text(range.end - 1);
    const char* const begin = preprocessed.data();
    Erase(merged, static_cast<size_t>(first.data() - begin),
          static_cast<size_t>(last.data() + last.size() - begin));
  }
  return merged;
}

}  // namespace metal_sim
