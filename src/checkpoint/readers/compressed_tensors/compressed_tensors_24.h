// The sparse forms of compressed-tensors: bitmasks of the numbers that are stored, and marlin-24.
//   X.compressed, X.bitmask u8 [.., ceil(k / 8)], lowest bits first, X.shape i64: the numbers whose
//     bits are set, in the order of the matrix. sparse-24-bitmask: [n, k / 2], two of every four
//     bits set; sparse-bitmask: [count], with X.row_offsets i64, the first number of each row.
//   X.weight_packed i32, X.meta i16, X.scale_packed f16: marlin-24, integers of 4 and 8 bits
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "checkpoint/codes/row_weights.h"

namespace marlin {

enum class BitmaskFormat : uint8_t { kNone, kSparse24, kAny };

/// A tensor that is stored as a bitmask and the numbers that are not 0, checked.
struct BitmaskTensor {
  DType dtype = DType::kF32;
  Shape shape;
  int64_t rows = 0;     ///< The product of all dimensions but the last.
  int64_t columns = 0;  ///< The last dimension, k.
  /// Every block of four along k keeps two, and no block crosses rows.
  bool blocks_in_rows = false;
  size_t values_tensor = 0;
  const std::byte* values = nullptr;
  const std::byte* bits = nullptr;
  int64_t count = 0;            ///< Numbers stored.
  std::vector<int64_t> starts;  ///< The first number of each row.

  /// Writes all k numbers of a row, DTypeBytes(dtype) each.
  void Expand(int64_t row, std::byte* out) const;
  /// The kept numbers, of one byte each, and their places. Precondition: blocks_in_rows.
  KeptRows Kept() const;
};

/// Finds and checks the tensors of base. Errors: kMalformedFile for other types, for shapes that
/// contradict each other, and for a wrong number of bits.
Result<BitmaskTensor> FindBitmask(BitmaskFormat format, std::initializer_list<DType> dtypes,
                                  ModuleTensorFinder* finder);

/// Adds the module of marlin-24's tensors. `bits` is from the configuration; 0: unknown. Errors:
/// kMalformedFile.
Status AddMarlin24(const std::string& name, int64_t bits, ModuleTensorFinder* finder,
                   ListedReader* reader);

}  // namespace marlin
