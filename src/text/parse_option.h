// Numbers and sizes in the options of the command and in arguments of the Python package.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "marlin/status.h"

namespace marlin {

/// The range of an integer option, both ends included.
struct WholeRange {
  int64_t least = 0;
  int64_t most = INT64_MAX;
};

/// The range of a real option: [least, most], or (least, most] if `least` is excluded.
struct RealRange {
  double least = 0;
  double most = std::numeric_limits<double>::max();
  bool without_least = false;
};

/// The number of threads that a command may start.
inline constexpr WholeRange kThreadRange{1, 4096};

/// Parses the whole text of an option as a number: decimal digits, with a point and an exponent for
/// real options. Errors: kInvalidArgument naming the option, the range and the text.
Result<int64_t> ParseOption(const char* option, const std::string& text, const WholeRange& range);
Result<double> ParseOption(const char* option, const std::string& text, const RealRange& range);

/// Parses a number of bytes, at least 1: "5GB", "500MB", "2GiB", "65536". Errors: as above.
Result<int64_t> ParseByteSize(const char* option, const std::string& text);

}  // namespace marlin
