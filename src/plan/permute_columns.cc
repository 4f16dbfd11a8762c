#include "plan/permute_columns.h"

#include "base/macros.h"
#include "plan/backend.h"

namespace marlin {
namespace {

/// One row whose elements are adjacent.
template <typename T>
void PermuteRow(const PermuteColumnsCall& call, const T* from, T* to) {
  const int64_t columns = call.from.dim(1);
  const int32_t* const permutation = call.permutation;
  if (call.scatter) {
    for (int64_t c = 0; c < columns; ++c) to[permutation[c]] = from[c];
  } else {
    for (int64_t c = 0; c < columns; ++c) to[c] = from[permutation[c]];
  }
}

template <typename T>
void PermuteAs(const PermuteColumnsCall& call, int64_t first, int64_t count) {
  const int64_t from_row = call.from.stride(0);
  const int64_t from_column = call.from.stride(1);
  const int64_t to_row = call.to.stride(0);
  const int64_t to_column = call.to.stride(1);
  const T* const from = call.from.As<T>() + first * from_row;
  T* const to = call.to.As<T>() + first * to_row;
  if (from_column == 1 && to_column == 1) {
    for (int64_t r = 0; r < count; ++r) PermuteRow(call, from + r * from_row, to + r * to_row);
    return;
  }
  // Adjacent elements of a transposed view belong to one column.
  for (int64_t c = 0; c < call.from.dim(1); ++c) {
    const int64_t other = call.permutation[c];
    const T* const source = from + (call.scatter ? c : other) * from_column;
    T* const target = to + (call.scatter ? other : c) * to_column;
    for (int64_t r = 0; r < count; ++r) target[r * to_row] = source[r * from_row];
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
