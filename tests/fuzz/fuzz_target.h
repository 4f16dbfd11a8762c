// Declarations and helpers for all fuzz targets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>

#include "marlin/status.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// Fails in every build, unlike assert.
#define MARLIN_FUZZ_CHECK(condition)                                                 \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                  \
    }                                                                                \
  } while (false)

namespace marlin {

inline std::string_view TextOf(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// Returns the text up to a separator and sets `*rest` to the text after it; without a separator
/// returns all of it.
inline std::string_view TakePart(std::string_view* rest, std::string_view separator) {
  const size_t end = rest->find(separator);
  const std::string_view part = rest->substr(0, end);
  rest->remove_prefix(end == std::string_view::npos ? rest->size() : end + separator.size());
  return part;
}

/// Checks the guarantees of every error message, for any input: it is one line, and of readable
/// length.
inline void CheckError(const Status& status) {
  constexpr size_t kLongestMessage = 16384;
  MARLIN_FUZZ_CHECK(status.code() != Code::kInternal);
  MARLIN_FUZZ_CHECK(!status.message().empty());
  MARLIN_FUZZ_CHECK(status.message().size() <= kLongestMessage);
  MARLIN_FUZZ_CHECK(status.message().find_first_of("\n\r") == std::string::npos);
}

}  // namespace marlin
