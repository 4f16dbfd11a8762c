// Reads small files whole.
#pragma once

#include <cstdint>
#include <string>

#include "marlin/status.h"

namespace marlin {

/// Most bytes of a user's text or token list.
inline constexpr int64_t kMaxTextBytes = int64_t{1} << 30;

/// The content of a regular file, following links. Never blocks: pipes, sockets, devices and
/// directories are rejected unread. Errors: kInvalidArgument for a NUL in the path; kIo naming it;
/// kMalformedFile with the limit when the content exceeds max_bytes; kOutOfMemory.
Result<std::string> ReadFile(const std::string& path, int64_t max_bytes);

/// All of standard input, whatever it is connected to. Errors as for ReadFile.
Result<std::string> ReadStandardInput(int64_t max_bytes);

}  // namespace marlin
