// Limits of Linux's control groups: of containers, batch systems and systemd.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace marlin {

struct GroupLimits {
  std::optional<int64_t> memory;     ///< Bytes.
  std::optional<int64_t> left;       ///< Bytes below the limit, without caches that can be dropped.
  std::optional<double> processors;  ///< Seconds of processor time per second.
};

/// The smallest limits of this process's group and of those above it, in version 2 and version 1.
/// All are empty where there are none, and on other systems. `root` is put before all paths.
GroupLimits ReadGroupLimits(const std::string& root = "");

}  // namespace marlin
