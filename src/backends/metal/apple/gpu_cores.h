// The GPU core count, which Metal does not report.
#pragma once

#include <cstdint>
#include <string_view>

namespace marlin::metal {

struct CoreCount {
  int cores = 0;
  const char* origin = "";  ///< "counted", "by name", "assumed"
};

/// Read from the I/O Registry; failing that, the highest count of a chip of this name, or 8.
CoreCount CountCores(uint64_t registry_id, std::string_view name);

}  // namespace marlin::metal
