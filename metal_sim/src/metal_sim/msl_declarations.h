// Finds the declarations at namespace scope of a Metal source. Owns where a declaration starts and
// ends; knows nothing of its meaning to a kernel.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "metal_sim/msl_source.h"

namespace metal_sim {

/// The content of a pair of braces.
enum class BraceKind : uint8_t { kNamespace, kType, kBody, kInitializer };

/// A declaration as indices of tokens: `template <...>` heads are [first, head), the rest up to
/// its `;` or to the brace of a body is [head, stop).
struct Declaration {
  size_t first;
  size_t head;
  size_t stop;
  size_t end;         ///< Past the `;` or the body.
  std::string scope;  ///< "a::b::" in namespaces a and b, "" outside; unnamed ones add nothing.
  bool has_body;      ///< A function's.

  bool is_template() const { return head > first; }
};

/// Lists the declarations at namespace scope in the order of the text; types are among them.
/// Errors: kInvalidArgument for a template head that does not end.
Result<std::vector<Declaration>> ListDeclarations(const MslSource& source);

/// The content of the brace at `open`, at any place. Found from the tokens in front of it.
BraceKind KindOfBrace(const MslSource& source, size_t open);

}  // namespace metal_sim
