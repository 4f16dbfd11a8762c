// Rejects paths that system calls would truncate.
#pragma once

#include <string>
#include <string_view>

#include "base/errors.h"
#include "marlin/status.h"

namespace marlin {

/// Checks that a path has no NUL: system calls would stop there and use another file. Errors:
/// kInvalidArgument with its position.
inline Status CheckPath(std::string_view path) {
  const size_t place = path.find('\0');
  if (place == std::string_view::npos) return {};
  return Invalid(std::string(path.substr(0, place)) + "?: a path ends at a NUL, which is at byte " +
                 std::to_string(place) + " of " + std::to_string(path.size()));
}

}  // namespace marlin
