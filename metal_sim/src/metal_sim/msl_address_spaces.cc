#include "metal_sim/msl_address_spaces.h"

#include <fmt/core.h>

#include <string_view>

#include "metal_sim/msl_declarations.h"

namespace metal_sim {
namespace {

/// Whether the parentheses at `open` hold the initializer of a member or base.
bool Initialize(const MslSource& source, size_t open) {
  if (source.Is(open - 2, ",")) return true;
  return source.Is(open - 2, ":") && !source.IsOneOf(open - 3, {"public", "private", "protected"});
}

/// Whether the parentheses at `open` are the parameters of a function that is defined there.
bool AreParameters(const MslSource& source, size_t open) {
  if (!source.Is(open, "(") || Initialize(source, open)) return false;
  const size_t around = source.Enclosing(open);
  if (around != kNoToken) {
    if (!source.Is(around, "{")) return false;
    const BraceKind kind = KindOfBrace(source, around);
    if (kind != BraceKind::kNamespace && kind != BraceKind::kType) return false;
  }
  const size_t after = source.Partner(open) + 1;
  return source.IsAddressSpace(after) ||
         source.IsOneOf(after, {"{", "const", "noexcept", "->", ":"});
}

class PointerFinder {
 public:
  explicit PointerFinder(const MslSource& source) : source_(source) {}

  std::vector<std::string> Run() {
    for (size_t i = 0; i < source_.size(); ++i) {
      if (AreParameters(source_, i)) CheckParameters(i);
      CheckVariable(i);
    }
    return std::move(findings_);
  }

 private:
  void CheckParameters(size_t open) {
    const size_t close = source_.Partner(open);
    size_t first = open + 1;
    for (size_t i = first; i <= close; ++i) {
      if (i == close || source_.Is(i, ",")) {
        CheckParameter(first, i);
        first = i + 1;
      } else if (source_.Partner(i) > i) {
        i = source_.Partner(i);
      } else if (source_.Is(i, "<") && source_.ClosingAngle(i, close) != kNoToken) {
        i = source_.ClosingAngle(i, close);
      }
    }
  }

  /// The parameter [first, end): a default argument, after `=`, is not looked at.
  void CheckParameter(size_t first, size_t end) {
    bool pointer = false;
    for (size_t i = first; i < end && !source_.Is(i, "="); ++i) {
      if (source_.IsAddressSpace(i)) return;
      const size_t angle = source_.Is(i, "<") ? source_.ClosingAngle(i, end) : kNoToken;
      if (angle != kNoToken) i = angle;
      pointer = pointer || source_.IsOneOf(i, {"*", "&"});
    }
    if (pointer) Add(first, end);
  }

  /// `float* x` and the like at the start of a statement.
  void CheckVariable(size_t index) {
    const bool starts =
        source_.IsOneOf(index - 1, {";", "{", "}"}) ||
        (source_.Is(index - 1, "const") && source_.IsOneOf(index - 2, {";", "{", "}"}));
    if (!starts || !source_.IsOneOf(index + 1, {"*", "&"}) || !IsBuiltIn(source_.Text(index))) {
      return;
    }
    if (source_.IsIdentifier(index + 2) && !source_.IsAddressSpace(index + 2))
      Add(index, index + 3);
  }

  static bool IsBuiltIn(std::string_view name) {
    if (!name.empty() && name.back() >= '2' && name.back() <= '4') name.remove_suffix(1);
    for (const std::string_view scalar : {"bool", "char", "uchar", "short", "ushort", "int", "uint",
                                          "long", "ulong", "half", "bfloat", "float"}) {
      if (name == scalar) return true;
    }
    return false;
  }

  void Add(size_t first, size_t end) {
    findings_.push_back(fmt::format("{}: '{}' names no address space", source_.Location(first),
                                    source_.Spell(first, end)));
  }

  const MslSource& source_;
  std::vector<std::string> findings_;
};

}  // namespace

std::vector<std::string> FindPointersWithoutSpace(const MslSource& source) {
  return PointerFinder(source).Run();
}

std::vector<std::string> FindRefusedWords(const MslSource& source) {
  std::vector<std::string> findings;
  for (size_t i = 0; i < source.size(); ++i) {
    const bool refused = source.IsOneOf(i, {"double", "virtual", "dynamic_cast", "typeid", "goto",
                                            "throw", "try", "catch", "thread_local", "new"});
    if (!refused) continue;
    findings.push_back(
        fmt::format("{}: error: Metal has no '{}'", source.Location(i), source.Text(i)));
  }
  return findings;
}

}  // namespace metal_sim
