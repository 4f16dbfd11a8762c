// Paths that the system's calls would read otherwise than they are written.
#pragma once

#include <string>
#include <string_view>

#include "marlin/status.h"

namespace marlin {

/// A path without a NUL: the system's calls end there and would work on another file. Errors:
/// kInvalidArgument with the place.
inline Status CheckPath(std::string_view path) {
  const size_t place = path.find('\0');
  if (place == std::string_view::npos) return {};
  return Status(Code::kInvalidArgument,
                std::string(path.substr(0, place)) + "?: a path ends at a NUL, which is at byte " +
                    std::to_string(place) + " of " + std::to_string(path.size()));
}

}  // namespace marlin
