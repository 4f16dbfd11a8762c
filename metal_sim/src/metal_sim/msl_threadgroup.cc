// Threadgroup variables are found by the word `threadgroup` at the start of a statement; elsewhere
// it qualifies the target of a pointer.
#include "metal_sim/msl_threadgroup.h"

#include <fmt/core.h>

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "metal_sim/msl_declarations.h"

namespace metal_sim {
namespace {

/// `alignas(16) threadgroup T a[4], b;` as indices of tokens.
struct VariableList {
  size_t first;                   // Begin of the statement: `alignas`, qualifiers or `threadgroup`.
  size_t type;                    // Past `threadgroup`.
  size_t type_end;                // The first declarator.
  std::vector<size_t> names;      // One a declarator.
  std::vector<size_t> name_ends;  // Past each one's name and dimensions.
  std::vector<size_t> ends;       // The `,` or `;` of each declarator.
};

bool IsQualifier(const MslSource& source, size_t index) {
  return source.Is(index, "const") || source.Is(index, "volatile");
}

bool IsIntegerWord(const MslSource& source, size_t index) {
  constexpr std::string_view kWords[] = {"unsigned", "signed", "short", "long", "int", "char"};
  for (const std::string_view word : kWords) {
    if (source.Is(index, word)) return true;
  }
  return false;
}

class ThreadgroupRewriter {
 public:
  ThreadgroupRewriter(MslSource& source, RewritePurpose purpose)
      : source_(source), checks_(purpose == RewritePurpose::kTypeCheck) {}

  Status Run() {
    for (size_t i = 0; i < source_.size(); ++i) {
      if (!source_.Is(i, "threadgroup")) continue;
      const size_t first = StatementStart(i);
      if (first == kNoToken) {
        METAL_SIM_RETURN_IF_ERROR(CheckNoVariable(i));
      } else {
        METAL_SIM_RETURN_IF_ERROR(RewriteStatement(first, i));
      }
    }
    return Status();
  }

 private:
  /// The first token of the statement whose address space is at `index`, kNoToken if more than
  /// alignments and qualifiers stand in front of it, as in casts and parameters.
  size_t StatementStart(size_t index) const {
    const size_t around = source_.Enclosing(index);
    if (around != kNoToken && !source_.Is(around, "{")) return kNoToken;
    size_t first = index;
    while (true) {
      const size_t open = source_.Is(first - 1, ")") ? source_.Partner(first - 1) : kNoToken;
      if (IsQualifier(source_, first - 1)) {
        --first;
      } else if (open != kNoToken && source_.Is(open - 1, "alignas")) {
        first = open - 1;
      } else {
        break;
      }
    }
    const bool starts = first == 0 || source_.Is(first - 1, ";") || source_.Is(first - 1, "{") ||
                        source_.Is(first - 1, "}") || source_.Is(first - 1, ":");
    return starts ? first : kNoToken;
  }

  /// The `;` that ends the statement at `index`, or the brace of a body in front of it.
  size_t StatementStop(size_t index) const {
    for (; index < source_.size() && !source_.Is(index, ";") && source_.Partner(index) >= index;
         index = source_.Partner(index) + 1) {
      const bool body =
          source_.Is(index, "{") && KindOfBrace(source_, index) != BraceKind::kInitializer;
      if (body) break;
    }
    return index;
  }

  /// `half threadgroup x[4];` and the like would become the thread's own.
  Status CheckNoVariable(size_t word) const {
    const size_t around = source_.Enclosing(word);
    const bool in_statement = around != kNoToken && source_.Is(around, "{");
    if (!in_statement || !source_.IsIdentifier(word - 1)) return Status();
    const size_t stop = StatementStop(word);
    for (size_t i = word; i < stop; i = source_.Partner(i) + 1) {
      if (source_.Is(i, "*") || source_.Is(i, "&") || source_.Is(i, "(")) return Status();
    }
    return source_.Error(word, "'threadgroup' must stand at the start of the declaration");
  }

  Status RewriteStatement(size_t first, size_t word) {
    const size_t stop = StatementStop(word);
    VariableList list = {first, word + 1, TypeEnd(word + 1, stop), {}, {}, {}};
    if (source_.Is(list.type_end, "*") || source_.Is(list.type_end, "&") ||
        IsPointerToArray(list.type_end)) {
      return CheckPointers(list.type_end, stop);
    }
    const size_t around = source_.Enclosing(word);
    if (around == kNoToken || KindOfBrace(source_, around) != BraceKind::kBody) {
      return source_.Error(word, "a threadgroup variable outside of a function");
    }
    METAL_SIM_RETURN_IF_ERROR(ReadDeclarators(list, stop));
    WriteVariables(list);
    return Status();
  }

  /// `(*x)[4]` or `(&x)[4]`.
  bool IsPointerToArray(size_t index) const {
    return source_.Is(index, "(") && (source_.Is(index + 1, "*") || source_.Is(index + 1, "&"));
  }

  /// Past the type at `index`: qualifiers, words like `unsigned int`, or one qualified name with
  /// template arguments.
  size_t TypeEnd(size_t index, size_t stop) const {
    bool named = false;
    for (; index < stop; ++index) {
      const bool qualified = source_.Is(index - 1, "::");
      const bool several =
          IsIntegerWord(source_, index) && (!named || IsIntegerWord(source_, index - 1));
      const size_t angle = source_.Is(index, "<") ? source_.ClosingAngle(index, stop) : kNoToken;
      if (IsQualifier(source_, index) || source_.Is(index, "typename") ||
          source_.Is(index, "struct") || source_.Is(index, "::") || source_.Is(index, "template")) {
        continue;
      }
      if (angle != kNoToken) {
        index = angle;
      } else if (source_.IsIdentifier(index) && (!named || qualified || several)) {
        named = true;
      } else {
        break;
      }
    }
    return index;
  }

  /// Pointers are left alone, but a variable among them would become the thread's own.
  Status CheckPointers(size_t first, size_t stop) const {
    for (size_t i = first; i < stop; i = source_.Partner(i) + 1) {
      const size_t angle = source_.Is(i, "<") ? source_.ClosingAngle(i, stop) : kNoToken;
      if (angle != kNoToken) i = angle;
      const bool variable =
          source_.Is(i, ",") && source_.IsIdentifier(i + 1) &&
          (source_.Is(i + 2, "[") || source_.Is(i + 2, ",") || source_.Is(i + 2, ";"));
      if (variable) return MixedError(i + 1);
    }
    return Status();
  }

  Status MixedError(size_t index) const {
    return source_.Error(index, "declare threadgroup variables and pointers apart");
  }

  Status ReadDeclarators(VariableList& list, size_t stop) const {
    size_t i = list.type_end;
    while (true) {
      if (source_.Is(i, "*") || source_.Is(i, "&")) return MixedError(i);
      const size_t name = i;
      if (!source_.IsIdentifier(name)) return UnreadableError(list.type - 1);
      for (++i; source_.Is(i, "["); i = source_.Partner(i) + 1) continue;
      const size_t name_end = i;
      while (i < stop && !source_.Is(i, ",")) i = source_.Partner(i) + 1;
      if (!source_.Is(i, ",") && (i != stop || !source_.Is(i, ";"))) {
        return UnreadableError(list.type - 1);
      }
      list.names.push_back(name);
      list.ends.push_back(i);
      list.name_ends.push_back(name_end);
      if (i == stop) return Status();
      ++i;
    }
  }

  Status UnreadableError(size_t index) const {
    return source_.Error(index, "cannot read this declaration of threadgroup variables");
  }

  void WriteVariables(const VariableList& list) {
    std::string qualifiers = source_.Spell(list.first, list.type - 1);
    if (!qualifiers.empty()) qualifiers = fmt::format(" {}", qualifiers);
    const std::string type = source_.Spell(list.type, list.type_end);
    // An alignment does not stick to a typedef that is a template's argument; to a member it does.
    const bool aligned = qualifiers.find("alignas") != std::string::npos;
    source_.Blank(list.first, list.type);
    for (size_t i = 0; i < list.names.size(); ++i) {
      const std::string_view name = source_.Text(list.names[i]);
      const std::string start = aligned ? fmt::format("struct {}__type {{{}", name, qualifiers)
                                        : fmt::format("typedef{}", qualifiers);
      const std::string declared = fmt::format("{}{}", name, aligned ? "" : "__type");
      if (i == 0) {  // The type itself stays where it is.
        source_.Replace(list.type - 1, start);
        source_.Replace(list.names[i], declared);
      } else {
        source_.Replace(list.names[i], fmt::format("{} {} {}", start, type, declared));
      }
      source_.Blank(list.name_ends[i], list.ends[i]);  // Metal takes initializers and does nothing.
      source_.Replace(list.ends[i],
                      fmt::format("{}; auto& {} = ::metal_sim::ThreadgroupVariable<{}__type>({}, "
                                  "\"{}\"){};",
                                  aligned ? "; }" : "", name, name, next_id_++, name,
                                  aligned ? fmt::format(".{}", name) : "") +
                          (checks_ ? LimitText(list.names[i]) : ""));
    }
  }

  /// A check of the sizes of all variables so far in the block.
  std::string LimitText(size_t name) {
    std::string& sizes = sizes_[source_.Enclosing(name)];
    sizes += fmt::format("{}sizeof({}__type)", sizes.empty() ? "" : " + ", source_.Text(name));
    return fmt::format(
        " static_assert({} <= 32768, \"more than 32768 bytes of threadgroup memory\");", sizes);
  }

  MslSource& source_;
  const bool checks_;
  std::map<size_t, std::string> sizes_;  // By the brace of the block.
  int next_id_ = 0;
};

}  // namespace

Status RewriteThreadgroupVariables(MslSource& source, RewritePurpose purpose) {
  return ThreadgroupRewriter(source, purpose).Run();
}

}  // namespace metal_sim
