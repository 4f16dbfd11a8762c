#include "plan/step/indices.h"

#include <fmt/core.h>

namespace marlin {

Status CheckIndices(const char* name, const TensorView& indices, int64_t limit) {
  for (int64_t i = 0; i < indices.dim(0); ++i) {
    const int64_t index = IndexAt(indices, i);
    if (index >= 0 && index < limit) continue;
    return Status(Code::kInvalidArgument,
                  limit == kPositionLimit && index < 0
                      ? fmt::format("{}: expected 0 or more, got {} at {}", name, index, i)
                      : fmt::format("{}: expected 0..{}, got {} at {}", name, limit - 1, index, i));
  }
  return {};
}

}  // namespace marlin
