// Lookup of a table's row by name, shared by every parser of user-supplied names.
#pragma once

#include <iterator>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/printable.h"
#include "marlin/status.h"

namespace marlin {

/// The first of `rows` whose `name_of(row)` is `name`. Errors: kInvalidArgument
/// "<what>: unknown <noun> '<name>'; known: <every row's name>".
template <typename Rows, typename NameOf>
auto FindNamed(std::string_view what, std::string_view noun, std::string_view name,
               const Rows& rows, NameOf name_of)
    -> Result<std::decay_t<decltype(*std::begin(rows))>> {
  std::string known;
  for (const auto& row : rows) {
    if (name_of(row) == name) return row;
    known += known.empty() ? "" : ", ";
    known += name_of(row);
  }
  return Status(Code::kInvalidArgument, std::string(what) + ": unknown " + std::string(noun) +
                                            " '" + Printable(name) + "'; known: " + known);
}

}  // namespace marlin
