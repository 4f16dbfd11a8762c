// Which launches may run at the same time: those without a barrier between them run in any order,
// also interleaved.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "backends/metal/runtime/driver.h"

namespace marlin::metal {

/// The declared byte ranges of the launches since the last barrier. KernelLaunch::reached is never
/// written while a launch may read it, and is left out. Not thread-safe.
class LaunchHazards {
 public:
  /// An earlier launch that must end before `launch` begins, because one of them writes what the
  /// other reads or writes; empty: a barrier is not needed.
  std::string_view Conflict(const KernelLaunch& launch) const;
  void Add(const KernelLaunch& launch);
  /// After a barrier.
  void Clear() { ranges_.clear(); }

 private:
  struct Range {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    bool written = false;
    std::string_view function;  ///< The launch.
  };
  static std::vector<Range> RangesOf(const KernelLaunch& launch);

  std::vector<Range> ranges_;
};

}  // namespace marlin::metal
