// The keys that a query sees.
#pragma once

#include <algorithm>
#include <cstdint>

namespace marlin {

/// The first key that the query at a position sees, as AttentionOptions says.
inline int64_t FirstVisibleKey(int64_t position, int64_t window, bool chunked) {
  if (window <= 0) return 0;
  return chunked ? position / window * window : std::max<int64_t>(position - window + 1, 0);
}

}  // namespace marlin
