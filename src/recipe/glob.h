// Glob patterns over tensor names.
#pragma once

#include <string_view>

namespace marlin {

/// True when the whole text matches: '*' is any run of characters (dots too), '?' any one
/// character. Time is at most proportional to the product of the lengths.
bool GlobMatch(std::string_view pattern, std::string_view text);

}  // namespace marlin
