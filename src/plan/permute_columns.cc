#include "plan/permute_columns.h"

#include "base/macros.h"
#include "plan/backend.h"

namespace marlin {
namespace {

template <typename T>
void PermuteAs(const PermuteColumnsCall& call, int64_t first, int64_t count) {
  const int64_t from_row = call.from.stride(0);
  const int64_t from_column = call.from.stride(1);
  const int64_t to_row = call.to.stride(0);
  const int64_t to_column = call.to.stride(1);
  const T* const from = call.from.As<T>() + first * from_row;
  T* const to = call.to.As<T>() + first * to_row;
  const auto move_column = [&](int64_t row, int64_t column) {
    const int64_t other = call.permutation[column];
    const int64_t source = call.scatter ? column : other;
    const int64_t target = call.scatter ? other : column;
    to[row * to_row + target * to_column] = from[row * from_row + source * from_column];
  };
  // Adjacent elements of the source belong to one row, or of a transposed view to one column.
  const int64_t columns = call.from.dim(1);
  if (from_row < from_column) {
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t r = 0; r < count; ++r) move_column(r, c);
    }
    return;
  }
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t c = 0; c < columns; ++c) move_column(r, c);
  }
}

}  // namespace

void PermuteRows(const PermuteColumnsCall& call, int64_t first, int64_t count) {
  if (DTypeBytes(call.from.dtype()) == 2) return PermuteAs<uint16_t>(call, first, count);
  PermuteAs<uint32_t>(call, first, count);
}

Status Backend::PermuteColumns(const PermuteColumnsCall& call, void* stream) const {
  MARLIN_RETURN_IF_ERROR(Synchronize(stream));
  PermuteRows(call, 0, call.from.dim(0));
  return {};
}

}  // namespace marlin
