// Rows of elements and their indices: where they are, and errors of indices.
#ifndef MARLIN_BACKENDS_METAL_KERNELS_ROWS_ROWS_ELEMENTS_H_
#define MARLIN_BACKENDS_METAL_KERNELS_ROWS_ROWS_ELEMENTS_H_

#include <metal_atomic>

#include "backends/metal/kernels/constants.h"
#include "backends/metal/kernels/elements.h"
#include "backends/metal/kernels/rows/rows_parameters.h"

namespace marlin {
namespace kernels {

/// The memory of an operand, which may be in the output's buffer.
static inline device const uchar* MemoryOf(RowStrides rows, device const uchar* own,
                                           device const uchar* output) {
  return (rows.in_output ? output : own) + rows.first;
}

/// The first element of a threadgroup's row: y of z.
static inline long RowAt(RowStrides rows, uint3 group) {
  return long(group.z) * rows.outer + long(group.y) * rows.inner;
}

static inline int FirstColumn(uint3 group, ushort thread_index, ushort threads) {
  return int(group.x) * threads + thread_index;
}

/// Keeps the bits of elements whose type stays.
static inline void CopyElement(device const uchar* from, long from_index, device uchar* to,
                               long to_index) {
  if (input_type != output_type) {
    StoreElement(to, output_type, to_index, LoadElement(from, input_type, from_index));
  } else if (input_type == kElementF32) {
    ((device uint*)to)[to_index] = ((device const uint*)from)[from_index];
  } else {
    ((device ushort*)to)[to_index] = ((device const ushort*)from)[from_index];
  }
}

static inline long IndexAt(device const uchar* indices, IndexParameters p, long i) {
  return p.wide ? ((device const long*)indices)[i] : long(((device const int*)indices)[i]);
}

static inline bool IsIndex(long index, IndexParameters p) { return index >= 0 && index < p.limit; }

/// The threads that find an error all store the same one, the first of the operands.
static inline void StoreError(device metal::atomic_int* error, int4 numbers) {
  MARLIN_UNROLL
  for (int i = 0; i < 4; ++i) {
    metal::atomic_store_explicit(error + i, numbers[i], metal::memory_order_relaxed);
  }
}

/// Stores where the first wrong index is, and its bits. Called by any threads that found one.
static METAL_FUNC void StoreIndexError(device const uchar* indices, IndexParameters p,
                                       device metal::atomic_int* error) {
  int at = 0;
  while (at < p.count - 1 && IsIndex(IndexAt(indices, p, at), p)) ++at;
  const long index = IndexAt(indices, p, at);
  StoreError(error, int4(at, int(index), int(index >> 32), 0));
}

}  // namespace kernels
}  // namespace marlin
#endif  // MARLIN_BACKENDS_METAL_KERNELS_ROWS_ROWS_ELEMENTS_H_
