// How far a run of several measurements is.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace marlin::bench {

/// Called before each of `total` measurements with the number that is done and the name of the next
/// one. May be empty.
using Progress = std::function<void(int64_t done, int64_t total, const std::string& next)>;

}  // namespace marlin::bench
