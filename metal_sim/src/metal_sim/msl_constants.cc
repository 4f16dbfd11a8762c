// Constants are declared before they are used, so one pass in the order of the text knows at each
// declaration which names function constants go into.
#include "metal_sim/msl_constants.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

namespace metal_sim {
namespace {

constexpr int kMaxConstantIndex = 65535;

/// Words in front of the type of a program-scope constant.
bool IsConstantSpecifier(const MslSource& source, size_t index) {
  return source.Is(index, "constant") || source.Is(index, "static") ||
         source.Is(index, "constexpr") || source.Is(index, "const") || source.Is(index, "inline") ||
         source.Is(index, "extern");
}

/// A declaration of one program-scope variable in `constant` memory.
struct Variable {
  size_t first;  // The specifiers are [first, type).
  size_t type;
  size_t name;  // The type is [type, name).
  size_t stop;  // The initializer, if any, and the sizes of an array are [name + 1, stop).
};

class ConstantRewriter {
 public:
  explicit ConstantRewriter(MslSource& source) : source_(source) {}

  Result<std::vector<ConstantEntry>> Run(std::span<const Declaration> declarations) {
    for (const Declaration& declaration : declarations) {
      const Attribute* const attribute = ConstantAttribute(declaration);
      if (attribute != nullptr) {
        METAL_SIM_RETURN_IF_ERROR(AddFunctionConstant(declaration, *attribute));
      } else if (IsConstant(declaration) && MentionsConstant(declaration)) {
        METAL_SIM_RETURN_IF_ERROR(AddComputed(declaration));
      }
    }
    METAL_SIM_RETURN_IF_ERROR(ReplaceUses());
    return std::move(entries_);
  }

 private:
  /// [[function_constant(...)]] of the declared variable; parameters may have one, too.
  const Attribute* ConstantAttribute(const Declaration& declaration) const {
    if (declaration.has_body) return nullptr;
    for (const Attribute& a : source_.Attributes(declaration.first, declaration.stop)) {
      const bool inside = source_.Enclosing(a.before) != source_.Enclosing(declaration.first);
      if (a.name == "function_constant" && !inside) return &a;
    }
    return nullptr;
  }

  bool IsConstant(const Declaration& declaration) const {
    if (declaration.has_body || !source_.Is(declaration.stop, ";")) return false;
    for (size_t i = declaration.head; IsConstantSpecifier(source_, i); ++i) {
      if (source_.Is(i, "constant")) return true;
    }
    return false;
  }

  bool MentionsConstant(const Declaration& declaration) const {
    for (size_t i = declaration.head; i < declaration.stop; ++i) {
      if (IsUse(i) &&
          (constants_.contains(source_.Text(i)) || computed_.contains(source_.Text(i)))) {
        return true;
      }
    }
    return false;
  }

  /// Whether the token names a variable rather than a member.
  bool IsUse(size_t index) const {
    return source_.IsIdentifier(index) && !source_.Is(index - 1, ".") &&
           !source_.Is(index - 1, "->");
  }

  /// Reads `constant T name`, up to `=`, `(`, `{`, `[` or the end.
  std::optional<Variable> ReadVariable(const Declaration& declaration) const {
    Variable variable = {declaration.first, declaration.head, kNoToken, declaration.stop};
    while (IsConstantSpecifier(source_, variable.type)) ++variable.type;
    size_t i = variable.type;
    for (; i < declaration.stop; ++i) {
      const size_t angle =
          source_.Is(i, "<") ? source_.ClosingAngle(i, declaration.stop) : kNoToken;
      if (angle != kNoToken) {
        i = angle;
      } else if (!source_.IsIdentifier(i) && !source_.Is(i, "::") && !source_.Is(i, "*")) {
        break;
      }
    }
    variable.name = i - 1;
    const bool plain = !declaration.is_template() && variable.name > variable.type &&
                       source_.IsIdentifier(variable.name) && !HasSecond(i, declaration.stop);
    return plain ? std::optional(variable) : std::nullopt;
  }

  /// Whether a comma that is in no brackets and no template's arguments announces another variable.
  bool HasSecond(size_t first, size_t stop) const {
    for (size_t i = first; i < stop; i = source_.Partner(i) + 1) {
      const size_t angle = source_.Is(i, "<") ? source_.ClosingAngle(i, stop) : kNoToken;
      if (angle != kNoToken) i = angle;
      if (source_.Is(i, ",")) return true;
    }
    return false;
  }

  Status AddFunctionConstant(const Declaration& declaration, const Attribute& attribute) {
    const std::optional<Variable> variable = ReadVariable(declaration);
    const bool alone = variable && variable->name + 1 == declaration.stop;
    if (!alone || !IsConstant(declaration)) {
      return source_.Error(declaration.first,
                           "[[function_constant]] needs `constant T name` without a value, one "
                           "variable a declaration");
    }
    const std::string_view name = source_.Text(variable->name);
    const std::optional<int> index = IntegerOf(attribute.arguments);
    if (!index || *index > kMaxConstantIndex) {
      return source_.Error(variable->name,
                           fmt::format("the index of function constant '{}' is no number from 0 "
                                       "to {}",
                                       name, kMaxConstantIndex));
    }
    for (const ConstantEntry& entry : entries_) {
      if (entry.index != *index) continue;
      return source_.Error(variable->name,
                           fmt::format("function constants '{}' and '{}' have the same index {}",
                                       entry.name, name, *index));
    }
    entries_.push_back({*index, declaration.scope + std::string(name),
                        source_.Spell(variable->type, variable->name)});
    constants_.insert(name);
    ReplaceSpecifiers(*variable, "extern constant");
    source_.Replace(variable->name, fmt::format("{} METAL_SIM_SYMBOL(constant, {})", name, *index));
    source_.Replace(declaration.stop,
                    fmt::format("; extern constant bool {}__defined METAL_SIM_SYMBOL(defined, {});",
                                name, *index));
    return Status();
  }

  /// A constant whose initializer mentions function constants.
  Status AddComputed(const Declaration& declaration) {
    const std::optional<Variable> variable = ReadVariable(declaration);
    const bool array = variable && source_.Is(variable->name + 1, "[");
    if (!variable || array) {
      return source_.Error(declaration.first,
                           "a constant computed from function constants must be one plain "
                           "variable a declaration, no array");
    }
    const std::string_view name = source_.Text(variable->name);
    ReplaceSpecifiers(*variable, "static inline");
    source_.Replace(variable->name, fmt::format("{}__value() {{ return", name));
    if (source_.Is(variable->name + 1, "=")) source_.Replace(variable->name + 1, " ");
    source_.Replace(declaration.stop, "; }");
    computed_.emplace(name, declaration.end);
    return Status();
  }

  void ReplaceSpecifiers(const Variable& variable, std::string words) {
    source_.Blank(variable.first, variable.type);
    source_.Replace(variable.first, std::move(words));
  }

  /// After their declarations, computed constants are calls.
  Status ReplaceUses() {
    for (size_t i = 0; i < source_.size(); ++i) {
      const auto computed = computed_.find(source_.Text(i));
      if (computed == computed_.end() || i < computed->second || !IsUse(i)) continue;
      const std::string_view name = computed->first;
      if (IsDeclared(i)) {
        return source_.Error(i, fmt::format("'{}' hides a constant that is computed from function "
                                            "constants; give it another name",
                                            name));
      }
      source_.Replace(i, fmt::format("{}__value()", name));
    }
    return Status();
  }

  /// Whether a type stands in front of the name.
  bool IsDeclared(size_t index) const {
    const std::string_view before = source_.Text(index - 1);
    constexpr std::string_view kNotTypes[] = {"return", "case", "else", "do", "and", "or", "not"};
    const bool keyword =
        std::find(std::begin(kNotTypes), std::end(kNotTypes), before) != std::end(kNotTypes);
    return source_.IsIdentifier(index - 1) && !keyword;
  }

  MslSource& source_;
  std::vector<ConstantEntry> entries_;
  std::set<std::string_view> constants_;
  std::map<std::string_view, size_t> computed_;  // And the end of the declaration.
};

}  // namespace

Result<std::vector<ConstantEntry>> RewriteConstants(MslSource& source,
                                                    std::span<const Declaration> declarations) {
  return ConstantRewriter(source).Run(declarations);
}

}  // namespace metal_sim
