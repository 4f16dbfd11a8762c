// Copies of rows, which may convert them: lookups in tables and conversions.
#pragma once

#include "backends/cuda/common/chain.cuh"
#include "backends/cuda/common/epilogue.cuh"
#include "backends/cuda/decoder/decoder_layout.h"
#include "backends/cuda/rows/record_error.cuh"
#include "backends/cuda/rows/typed.cuh"

namespace marlin::cuda {

inline constexpr int kCopyThreads = 256;

/// out[r] = from[ids[r]], or from[r] without ids.
struct CopyRowsArguments {
  RowsView from;
  RowsView out;
  IndexView ids;
  int64_t columns = 0;
  ErrorView errors;
};

/// The row that becomes `row`, or -1 with a record of why.
MARLIN_DEVICE int64_t CopiedRow(const CopyRowsArguments& args, int64_t row) {
  if (args.ids.data == nullptr) return row;
  const int64_t id = args.ids.At(row);
  if (id >= 0 && id < args.from.rows) return id;
  RecordError(args.errors, ValueError::kIds, id, row, args.from.rows);
  return -1;
}

/// blockIdx.x strides over rows; blockIdx.y and the threads over columns, kAdjacent of them at a
/// time: 1, or 4 for what CopiesQuads.
template <int kAdjacent>
__global__ void __launch_bounds__(kCopyThreads)
    CopyRowsKernel(const __grid_constant__ CopyRowsArguments args) {
  EnterChain();
  const int64_t first = (static_cast<int64_t>(blockIdx.y) * kCopyThreads + threadIdx.x) * kAdjacent;
  const int64_t step = static_cast<int64_t>(gridDim.y) * kCopyThreads * kAdjacent;
  for (int64_t row = blockIdx.x; row < args.out.rows; row += gridDim.x) {
    const int64_t copied = first < args.columns ? CopiedRow(args, row) : -1;
    if (copied < 0) continue;
    const int64_t from = args.from.At(copied);
    const int64_t to = args.out.At(row);
    for (int64_t column = first; column < args.columns; column += step) {
      if constexpr (kAdjacent == 4) {
        StoreFour(args.out.data, args.out.type, to + column,
                  LoadFour(args.from.data, args.from.type, from + column));
      } else {
        StoreFloat(args.out.data, args.out.type, to + column,
                   LoadFloat(args.from.data, args.from.type, from + column));
      }
    }
  }
}

/// Whether rows have quads at multiples of their size, of types that are loaded as quads.
inline bool HasQuads(const RowsView& rows) {
  if (rows.type != Element::kF32 && rows.type != Element::kBf16 && rows.type != Element::kF16) {
    return false;
  }
  const uintptr_t bytes = rows.type == Element::kF32 ? 16 : 8;
  return reinterpret_cast<uintptr_t>(rows.data) % bytes == 0 && rows.stride % 4 == 0 &&
         rows.inner_stride % 4 == 0;
}

/// Whether rows are copied four columns at a time.
inline bool CopiesQuads(const CopyRowsArguments& args) {
  return args.columns % 4 == 0 && HasQuads(args.from) && HasQuads(args.out);
}

}  // namespace marlin::cuda
