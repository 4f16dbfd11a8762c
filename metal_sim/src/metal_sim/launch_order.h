// Finds launches between which a barrier is missing. They are run one after the other, and what
// they did is compared: launches without a barrier between them may run in any order and
// interleaved on a GPU, so that a byte which one of them writes and another reads or writes is an
// error whatever the order was here, as in the race detector within a launch (shadow_cell.h).
// Running them interleaved would show the same bytes, or only a wrong result, and cost more.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "metal_sim/launch.h"

namespace metal_sim {

/// Not thread-safe.
class LaunchOrder {
 public:
  /// Launches of longer ago are forgotten.
  static constexpr size_t kMostLaunches = 256;

  /// Every earlier launch ends before the next one begins.
  void Barrier() { launches_.clear(); }
  /// Adds a launch that ran. One line about an earlier one that may run at the same time and must
  /// not, with the names of both, if there is one.
  std::optional<std::string> Add(std::string kernel, std::vector<ObservedAccess> observed);

 private:
  struct Ran {
    std::string kernel;
    std::vector<ObservedAccess> observed;
  };

  std::deque<Ran> launches_;
};

}  // namespace metal_sim
