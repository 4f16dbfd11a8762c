// The memory available to this process.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace marlin {

/// Most memory that this process may use, in bytes: the machine's, or the limit of its control
/// groups where that is smaller. INT64_MAX if the system reports neither.
int64_t MemoryBytes();

/// Memory that could be allocated now without swapping, in bytes, within the limit of its control
/// groups. None if the system does not say. `root` is put before the paths of Linux's files.
std::optional<int64_t> FreeMemoryBytes(const std::string& root = "");

}  // namespace marlin
