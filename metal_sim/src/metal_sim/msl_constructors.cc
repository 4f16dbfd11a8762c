// Constructors are found by their looks: the name of a type followed by a parenthesis that opens
// no declarator.
#include "metal_sim/msl_constructors.h"

#include <fmt/core.h>

#include <string>

#include "metal_sim/msl_vector_names.h"

namespace metal_sim {
namespace {

class ConstructorRewriter {
 public:
  explicit ConstructorRewriter(MslSource& source) : source_(source), names_(source) {}

  void Run() {
    for (size_t i = 0; i < source_.size(); ++i) RewriteAt(i);
  }

 private:
  /// Whether the parenthesis holds operands: not as in `half4 (*x)[4]` or `half4 (&)(int)`.
  bool HoldsOperands(size_t open) const {
    if (!source_.Is(open, "(")) return false;
    const bool pointer = source_.Is(open + 1, "*") || source_.Is(open + 1, "&");
    const size_t after = source_.Partner(open) + 1;
    return !pointer || (!source_.Is(after, "[") && !source_.Is(after, "("));
  }

  void RewriteAt(size_t index) {
    if (!names_.IsVector(index) || source_.Is(index - 1, "operator")) return;
    const size_t open = names_.TypeEnd(index);
    if (!HoldsOperands(open)) return;
    bool several = false;
    for (size_t i = open + 1; i < source_.Partner(open); i = source_.Partner(i) + 1) {
      const size_t angle =
          source_.Is(i, "<") ? source_.ClosingAngle(i, source_.Partner(open)) : kNoToken;
      if (angle != kNoToken) i = angle;
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
  const VectorNames names_;
};

}  // namespace

void RewriteConstructors(MslSource& source) { ConstructorRewriter(source).Run(); }

}  // namespace metal_sim
