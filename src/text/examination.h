// The call of `doctor` into the program that embeds the command.
#pragma once

#include <functional>
#include <string>

#include "marlin/status.h"

namespace marlin {

/// Examines that program and what it needs. Returns a JSON array of findings, each with "group",
/// "name", "state" (ok, warning, missing or broken), "found" and "advice". With `offline` it asks
/// no server.
using Examination = std::function<Result<std::string>(bool offline)>;

}  // namespace marlin
