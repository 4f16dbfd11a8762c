#include "plan/step/indices.h"

#include <fmt/core.h>

namespace marlin {

Status WrongIndex(const char* name, int64_t index, int64_t at, int64_t limit) {
  return Status(Code::kInvalidArgument,
                limit == kPositionLimit && index < 0
                    ? fmt::format("{}: expected 0 or more, got {} at {}", name, index, at)
                    : fmt::format("{}: expected 0..{}, got {} at {}", name, limit - 1, index, at));
}

Status CheckIndices(const char* name, const TensorView& indices, int64_t limit) {
  for (int64_t i = 0; i < indices.dim(0); ++i) {
    const int64_t index = IndexAt(indices, i);
    if (index < 0 || index >= limit) return WrongIndex(name, index, i, limit);
  }
  return {};
}

Status CheckFirstRows(const TensorView& first_rows, int64_t rows) {
  const auto* const first = first_rows.As<int32_t>();
  const int64_t sequences = first_rows.dim(0) - 1;
  for (int64_t s = 0; s <= sequences; ++s) {
    const int64_t least = s == 0 ? 0 : first[s - 1];
    const int64_t most = s == 0 ? 0 : rows;
    if (first[s] < least || first[s] > most || (s == sequences && first[s] != rows)) {
      return Status(Code::kInvalidArgument,
                    fmt::format("first_rows: expected to ascend from 0 to {}, got {} at {}", rows,
                                first[s], s));
    }
  }
  return {};
}

}  // namespace marlin
