// The status of an argument that is not valid.
#pragma once

#include <string_view>

#include "marlin/status.h"

namespace marlin {

/// Returns kInvalidArgument with a one-line message that names the argument.
inline Status Invalid(std::string_view message) { return {Code::kInvalidArgument, message}; }

}  // namespace marlin
