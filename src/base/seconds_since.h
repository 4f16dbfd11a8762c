// Elapsed time for reports.
#pragma once

#include <chrono>

namespace marlin {

/// The seconds since a time of the steady clock.
inline double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace marlin
