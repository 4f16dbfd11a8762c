// Declarations are found by their punctuation: a statement ends at ';' or at a brace, and the words
// in front of a brace tell its content.
#include "metal_sim/msl_declarations.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace metal_sim {
namespace {

/// Every declaration holds its scope; this bounds their total size.
constexpr size_t kMaxScope = 1000;

/// The start of the statement that the token at `index` belongs to, at its level of brackets.
size_t StatementStart(const MslSource& source, size_t index) {
  size_t start = index;
  while (start > 0) {
    const size_t previous = start - 1;
    if (source.Is(previous, ";") || source.Is(previous, "{") || source.Is(previous, "}")) break;
    // Steps over parenthesized tokens; a bracket that opens encloses the statement.
    const size_t partner = source.Partner(previous);
    if (partner > previous) break;
    start = partner;
  }
  return start;
}

bool IsClassKey(const MslSource& source, size_t index) {
  return source.Is(index, "struct") || source.Is(index, "class") || source.Is(index, "union") ||
         source.Is(index, "enum");
}

/// Parentheses after these words belong to a specifier, not to a function.
bool TakesParentheses(const MslSource& source, size_t index) {
  return source.Is(index, "alignas") || source.Is(index, "__attribute__") ||
         source.Is(index, "decltype") || source.Is(index, "noexcept");
}

/// The content of a brace after the tokens [head, open); `head` is after template heads.
BraceKind KindBehind(const MslSource& source, size_t head, size_t open) {
  bool names_type = false;
  bool constant = false;
  bool parameters = false;
  for (size_t i = head; i < open; i = source.Partner(i) + 1) {
    if (source.Is(i, "namespace")) return BraceKind::kNamespace;
    if (source.Is(i, "=")) return BraceKind::kInitializer;
    names_type |= IsClassKey(source, i);
    constant |= source.Is(i, "constant");
    parameters |= source.Is(i, "(") && !TakesParentheses(source, i - 1);
    const size_t angle = source.Is(i + 1, "<") ? source.ClosingAngle(i + 1, open) : kNoToken;
    if (angle != kNoToken) i = angle;
  }
  if (source.Is(head, "extern") && head + 2 == open) return BraceKind::kNamespace;
  if (parameters) return BraceKind::kBody;
  if (names_type) return BraceKind::kType;
  return constant ? BraceKind::kInitializer : BraceKind::kBody;
}

/// Past the `template <...>` heads at `index`, kNoToken if one does not end. An explicit
/// instantiation, `template` without angles, has no head.
size_t SkipTemplateHeads(const MslSource& source, size_t index) {
  while (source.Is(index, "template") && source.Is(index + 1, "<")) {
    const size_t close = source.ClosingAngle(index + 1, source.size());
    if (close == kNoToken) return kNoToken;
    index = close + 1;
  }
  return index;
}

/// Walks the declarations of one source.
class DeclarationLister {
 public:
  explicit DeclarationLister(const MslSource& source) : source_(source) {}

  Result<std::vector<Declaration>> Run() {
    while (position_ < source_.size()) {
      if (source_.Is(position_, "}")) {
        scopes_.pop_back();  // Brackets are paired, so this closes the innermost namespace.
        ++position_;
      } else {
        METAL_SIM_RETURN_IF_ERROR(AddDeclaration());
      }
    }
    return std::move(declarations_);
  }

 private:
  Status AddDeclaration() {
    const size_t first = position_;
    const size_t head = SkipTemplateHeads(source_, first);
    if (head == kNoToken) return source_.Error(first, "a template head is not closed");
    size_t stop = head;
    BraceKind kind = BraceKind::kInitializer;
    for (; stop < source_.size() && !source_.Is(stop, ";"); stop = source_.Partner(stop) + 1) {
      if (source_.Is(stop, "}")) break;  // Something without ';' at the end of a namespace.
      if (!source_.Is(stop, "{")) continue;
      kind = KindBehind(source_, head, stop);
      if (kind != BraceKind::kInitializer) break;
    }
    if (kind == BraceKind::kNamespace) {
      return EnterNamespace(head, stop);
    }
    size_t end = stop;
    if (source_.Is(stop, "{")) end = source_.Partner(stop);
    if (!source_.Is(end, "}") || end != stop) ++end;
    position_ = std::min(end, source_.size());
    declarations_.push_back({first, head, stop, position_, Scope(), kind == BraceKind::kBody});
    return Status();
  }

  Status EnterNamespace(size_t head, size_t brace) {
    std::string name;
    for (size_t i = head; i < brace; ++i) {
      const bool part = source_.IsIdentifier(i) && !source_.Is(i, "namespace") &&
                        !source_.Is(i, "inline") && !source_.Is(i, "extern");
      if (part) name.append(source_.Text(i)).append("::");
    }
    scopes_.push_back(Scope() + name);
    position_ = brace + 1;
    if (scopes_.back().size() <= kMaxScope) return Status();
    return source_.Error(head, fmt::format("the namespaces around have {} characters, limit {}",
                                           scopes_.back().size(), kMaxScope));
  }

  std::string Scope() const { return scopes_.empty() ? "" : scopes_.back(); }

  const MslSource& source_;
  size_t position_ = 0;
  std::vector<std::string> scopes_;
  std::vector<Declaration> declarations_;
};

}  // namespace

Result<std::vector<Declaration>> ListDeclarations(const MslSource& source) {
  return DeclarationLister(source).Run();
}

BraceKind KindOfBrace(const MslSource& source, size_t open) {
  const size_t start = StatementStart(source, open);
  const size_t head = SkipTemplateHeads(source, start);
  return KindBehind(source, head == kNoToken ? start : head, open);
}

}  // namespace metal_sim
