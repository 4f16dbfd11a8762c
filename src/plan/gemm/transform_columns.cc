#include "plan/gemm/transform_columns.h"

#include <algorithm>

#include "base/aligned_buffer.h"
#include "base/macros.h"
#include "base/scalars.h"
#include "layout/input_transform.h"
#include "plan/gemm/backend.h"

namespace marlin {
namespace {

/// One row whose elements are adjacent.
template <typename T>
void PermuteRow(const TransformColumnsCall& call, const T* from, T* to) {
  const int64_t columns = call.from.dim(1);
  const int32_t* const permutation = call.transform.permutation;
  if (call.inverse) {
    for (int64_t c = 0; c < columns; ++c) to[permutation[c]] = from[c];
  } else {
    for (int64_t c = 0; c < columns; ++c) to[c] = from[permutation[c]];
  }
}

template <typename T>
void PermuteAs(const TransformColumnsCall& call, int64_t first, int64_t count) {
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
    const int64_t other = call.transform.permutation[c];
    const T* const source = from + (call.inverse ? c : other) * from_column;
    T* const target = to + (call.inverse ? other : c) * to_column;
    for (int64_t r = 0; r < count; ++r) target[r * to_row] = source[r * from_row];
  }
}

/// Rows of fp32 numbers that are computed together, so that transposed views are read and written
/// in runs of adjacent elements.
constexpr int64_t kRowsTogether = 16;

template <typename Stored, typename Widen>
void LoadRows(const TensorView& from, int64_t first, int64_t count, Widen widen, float* rows) {
  const int64_t columns = from.dim(1);
  const Stored* const source = from.As<Stored>() + first * from.stride(0);
  if (from.stride(1) == 1) {
    for (int64_t r = 0; r < count; ++r) {
      const Stored* const row = source + r * from.stride(0);
      for (int64_t c = 0; c < columns; ++c) rows[r * columns + c] = widen(row[c]);
    }
    return;
  }
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = 0; r < count; ++r) {
      rows[r * columns + c] = widen(source[r * from.stride(0) + c * from.stride(1)]);
    }
  }
}

template <typename Stored, typename Round>
void StoreRows(const float* rows, int64_t first, int64_t count, Round round,
               const MutableTensorView& to) {
  const int64_t columns = to.dim(1);
  Stored* const target = to.As<Stored>() + first * to.stride(0);
  if (to.stride(1) == 1) {
    for (int64_t r = 0; r < count; ++r) {
      Stored* const row = target + r * to.stride(0);
      for (int64_t c = 0; c < columns; ++c) row[c] = round(rows[r * columns + c]);
    }
    return;
  }
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = 0; r < count; ++r) {
      target[r * to.stride(0) + c * to.stride(1)] = round(rows[r * columns + c]);
    }
  }
}

float SameFloat(float value) { return value; }

void Load(const TensorView& from, int64_t first, int64_t count, float* rows) {
  switch (from.dtype()) {
    case DType::kBf16:
      return LoadRows<uint16_t>(from, first, count, Bf16ToFloat, rows);
    case DType::kF16:
      return LoadRows<uint16_t>(from, first, count, HalfToFloat, rows);
    default:
      return LoadRows<float>(from, first, count, SameFloat, rows);
  }
}

void Store(const float* rows, int64_t first, int64_t count, const MutableTensorView& to) {
  switch (to.dtype()) {
    case DType::kBf16:
      return StoreRows<uint16_t>(rows, first, count, FloatToBf16, to);
    case DType::kF16:
      return StoreRows<uint16_t>(rows, first, count, FloatToHalf, to);
    default:
      return StoreRows<float>(rows, first, count, SameFloat, to);
  }
}

/// One row of fp32 numbers; `moved` has the room for another.
void TransformRow(const InputTransform& transform, bool inverse, int64_t columns, float* row,
                  float* moved) {
  const auto scale_row = [&] {
    if (transform.scale == nullptr) return;
    for (int64_t c = 0; c < columns; ++c) row[c] *= transform.scale[c];
  };
  const auto move_row = [&] {
    if (transform.permutation == nullptr) return;
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t other = transform.permutation[c];
      moved[inverse ? other : c] = row[inverse ? c : other];
    }
    std::copy_n(moved, columns, row);
  };
  if (inverse) {
    move_row();
  } else {
    scale_row();
  }
  if (transform.hadamard > 0) HadamardInPlace(row, columns, transform.hadamard);
  if (inverse) {
    scale_row();
  } else {
    move_row();
  }
}

}  // namespace

Status TransformRows(const TransformColumnsCall& call, int64_t first, int64_t count) {
  if (call.transform.keeps_values()) {
    if (DTypeBytes(call.from.dtype()) == 2) {
      PermuteAs<uint16_t>(call, first, count);
    } else {
      PermuteAs<uint32_t>(call, first, count);
    }
    return {};
  }
  const int64_t columns = call.from.dim(1);
  const int64_t most = std::min(kRowsTogether, count);
  MARLIN_ASSIGN_OR_RETURN(const AlignedBuffer memory,
                          AlignedBuffer::Allocate((most + 1) * columns * int64_t{sizeof(float)}));
  float* const rows = memory.As<float>();
  float* const moved = rows + most * columns;
  for (int64_t r0 = first; r0 < first + count; r0 += kRowsTogether) {
    const int64_t together = std::min(kRowsTogether, first + count - r0);
    Load(call.from, r0, together, rows);
    for (int64_t r = 0; r < together; ++r) {
      TransformRow(call.transform, call.inverse, columns, rows + r * columns, moved);
    }
    Store(rows, r0, together, call.to);
  }
  return {};
}

Status Backend::TransformColumns(const TransformColumnsCall& call, void* stream) const {
  MARLIN_RETURN_IF_ERROR(Synchronize(stream));
  return TransformRows(call, 0, call.from.dim(0));
}

}  // namespace marlin
