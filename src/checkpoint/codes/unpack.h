// Brings codes and scales that other programs store by output feature into the canonical layout.
//
// A row is what one output feature of one expert has along k; row r belongs to expert r / n and to
// column r % n of the canonical matrices.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/function_ref.h"
#include "base/thread_pool.h"
#include "layout/weights_buffer.h"
#include "marlin/tensor.h"

namespace marlin {

/// Rows of codes as dense little-endian bit strings, element 0 in the lowest bits.
struct DenseRows {
  const std::byte* data = nullptr;
  int64_t row_bytes = 0;      ///< Distance of rows; at least ceil(k * bits / 8).
  uint32_t flip = 0;          ///< XORed to every word: turns two's complement into offset binary.
  bool swap_nibbles = false;  ///< The high nibble of a byte comes first.
};

/// Writes the codes of all rows. Precondition: a format of at most 8 bits.
void PackDenseRows(const DenseRows& rows, const WeightsBuffer& buffer, ThreadPool& pool);

/// Writes codes that `unpack` gives as one byte each, k of them, for row r.
using UnpackRow = FunctionRef<void(int64_t row, uint8_t* codes)>;
void PackByteRows(UnpackRow unpack, const WeightsBuffer& buffer, ThreadPool& pool);

/// Writes the values and the metadata of 2:4 weights: for row r, with k rounded up to a multiple of
/// kSparseRun, `codes` gives k / 2 kept codes and `positions` k / 4 nibbles, one byte each.
void PackKeptRows(UnpackRow codes, UnpackRow positions, const WeightsBuffer& buffer,
                  ThreadPool& pool);

/// Writes values of the format fp32, k of them for row r.
using FloatRow = FunctionRef<void(int64_t row, float* values)>;
void StoreFloatRows(FloatRow values, const WeightsBuffer& buffer, ThreadPool& pool);

/// Writes the zeros [groups, n] of all rows, each as fp16, from numbers that `zero` gives.
using ZeroOfGroup = FunctionRef<int(int64_t row, int64_t group)>;
void StoreZeros(ZeroOfGroup zero, const WeightsBuffer& buffer);

/// Writes scales [experts, ceil(n / scale_rows), groups], each of which `scale_rows` rows share.
void StoreScales(const std::byte* from, int64_t scale_rows, const WeightsBuffer& buffer);

/// Transposes `count` matrices [rows, columns] of elements of 1, 2, 4 or 8 bytes.
void TransposeElements(const std::byte* from, int64_t count, int64_t rows, int64_t columns,
                       int64_t element_bytes, void* to);

/// A little-endian number at any address.
uint32_t WordAt(const std::byte* data, int64_t index);

/// `count` codes of `bits` bits from a dense bit string that begins at `data`, of which no byte
/// past the last code is read.
void UnpackDense(const std::byte* data, int bits, int64_t count, uint8_t* codes);

}  // namespace marlin
