// How many cores a GPU has, which Metal does not say.
#pragma once

#include <cstdint>
#include <string_view>

namespace marlin::metal {

struct CoreCount {
  int cores = 0;
  const char* origin = "";  ///< "counted", "by name", "assumed"
};

/// From the registry of devices; else the most that a chip of this name comes with; else 8.
CoreCount CountCores(uint64_t registry_id, std::string_view name);

}  // namespace marlin::metal
