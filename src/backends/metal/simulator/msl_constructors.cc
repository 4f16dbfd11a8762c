// Constructors are found by their looks: the name of a type with a parenthesis behind it that opens
// no declarator.
#include "backends/metal/simulator/msl_constructors.h"

#include <fmt/format.h>

#include <set>
#include <string>
#include <string_view>

namespace marlin::metal::simulator {
namespace {

constexpr size_t kNone = MslSource::kNone;

/// `half4`, `uchar2`, `packed_float3`.
bool IsVectorName(std::string_view name) {
  if (name.starts_with("packed_")) name.remove_prefix(7);
  if (name.empty() || name.back() < '2' || name.back() > '4') return false;
  name.remove_suffix(1);
  constexpr std::string_view kScalars[] = {"bool", "char", "uchar", "short", "ushort", "int",
                                           "uint", "long", "ulong", "half",  "bfloat", "float"};
  for (const std::string_view scalar : kScalars) {
    if (name == scalar) return true;
  }
  return false;
}

class ConstructorRewriter {
 public:
  explicit ConstructorRewriter(MslSource& source) : source_(source) {}

  void Run() {
    for (size_t i = 0; i < source_.size(); ++i) AddAlias(i);
    for (size_t i = 0; i < source_.size(); ++i) RewriteAt(i);
  }

 private:
  bool IsVector(size_t index) const {
    const std::string_view name = source_.Text(index);
    return source_.IsIdentifier(index) &&
           (IsVectorName(name) || name == "vec" || aliases_.contains(name));
  }

  /// `using NAME = ...;` and `typedef ... NAME;` that mention a vector.
  void AddAlias(size_t index) {
    const bool is_using = source_.Is(index, "using") && source_.Is(index + 2, "=");
    if (!is_using && !source_.Is(index, "typedef")) return;
    size_t stop = index;
    bool vector = false;
    for (; stop < source_.size() && !source_.Is(stop, ";"); ++stop) {
      vector = vector || (stop > index + 1 && IsVector(stop));
    }
    const size_t name = is_using ? index + 1 : stop - 1;
    if (vector && source_.IsIdentifier(name)) aliases_.insert(source_.Text(name));
  }

  /// Behind the type whose name is at `index`.
  size_t TypeEnd(size_t index) const {
    if (!source_.Is(index + 1, "<")) return index + 1;
    const size_t angle = source_.ClosingAngle(index + 1, source_.size());
    return angle == kNone ? index + 1 : angle + 1;
  }

  /// Whether the parenthesis holds operands: not as in `half4 (*x)[4]` or `half4 (&)(int)`.
  bool HoldsOperands(size_t open) const {
    if (!source_.Is(open, "(")) return false;
    const bool pointer = source_.Is(open + 1, "*") || source_.Is(open + 1, "&");
    const size_t behind = source_.Partner(open) + 1;
    return !pointer || (!source_.Is(behind, "[") && !source_.Is(behind, "("));
  }

  void RewriteAt(size_t index) {
    if (!IsVector(index) || source_.Is(index - 1, "operator")) return;
    const size_t open = TypeEnd(index);
    if (!HoldsOperands(open)) return;
    bool several = false;
    for (size_t i = open + 1; i < source_.Partner(open); i = source_.Partner(i) + 1) {
      const size_t angle =
          source_.Is(i, "<") ? source_.ClosingAngle(i, source_.Partner(open)) : kNone;
      if (angle != kNone) i = angle;
      several = several || source_.Is(i, ",");
    }
    size_t first = index;
    if (source_.Is(first - 1, "::") && source_.Is(first - 2, "metal")) first -= 2;
    const std::string type = source_.Spell(first, open);
    source_.Blank(first, open);
    source_.Replace(
        index, several ? fmt::format("(({})", type) : fmt::format("::metal_sim::Make<{}>", type));
    if (several) source_.Replace(source_.Partner(open), "))");
  }

  MslSource& source_;
  std::set<std::string_view> aliases_;
};

}  // namespace

void RewriteConstructors(MslSource& source) { ConstructorRewriter(source).Run(); }

}  // namespace marlin::metal::simulator
