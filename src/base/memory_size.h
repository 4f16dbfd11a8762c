// How much memory there is.
#pragma once

#include <cstdint>

namespace marlin {

/// Bytes of memory that this process may have at most: the machine's, or the limit of its control
/// group where that is smaller. INT64_MAX where the system does not say.
int64_t MemoryBytes();

}  // namespace marlin
