// The memory available to this process.
#pragma once

#include <cstdint>

namespace marlin {

/// Most memory that this process may use, in bytes: the machine's, or its cgroup limit where that
/// is smaller. INT64_MAX if the system reports neither.
int64_t MemoryBytes();

}  // namespace marlin
