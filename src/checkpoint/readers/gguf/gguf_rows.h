// The rows of a matrix of a GGUF file in the order in which Hugging Face stores them.
#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "checkpoint/readers/gguf/gguf_blocks.h"
#include "marlin/status.h"
#include "marlin/weights.h"

namespace marlin {

/// A stack of matrices [experts, rows, columns] whose rows come from one stack, or from two of one
/// shape.
struct GgufRows {
  std::vector<const std::byte*> stacks;  ///< One or two.
  bool in_turn = false;                  ///< Rows come from two stacks in turn; false: one by one.
  int64_t experts = 1;
  int64_t rows = 0;    ///< Rows of the result.
  int64_t stored = 0;  ///< Rows of a matrix of the stacks together, if there are more; otherwise 0.
  int64_t row_bytes = 0;
  std::vector<int64_t> places;  ///< The stored row of each row; empty: in order.
  /// The parts of a row, which has as many, that the parts of the result's rows are; empty: in
  /// order.
  std::vector<int64_t> column_parts;

  const std::byte* Row(int64_t expert, int64_t row) const;
};

/// Writes the rows in order, or with `transposed` each matrix as [columns, rows]. Precondition:
/// rows of whole parts.
void CopyGgufRows(const GgufRows& rows, int64_t element_bytes, bool transposed, std::byte* out);

/// Writes the values of the rows in fp32.
void DequantizeGgufRows(const GgufRows& rows, const GgufStored& stored, float* out);

/// The two factors of MLA's up-projection as files store them: keys [heads, rank, nope], transposed
/// to be multiplied with queries, and values [heads, v, rank].
struct GgufLatent {
  GgufRows keys;
  GgufStored keys_stored;
  GgufRows values;
  GgufStored values_stored;
};

/// Writes kv_b_proj.weight [heads * (nope + v), rank] in fp32: of each head the keys' rows, then
/// the values'.
void JoinGgufLatent(const GgufLatent& latent, float* out);

/// The rows as weights in the canonical layout: row r is column n = r. `global_scale` has one value
/// for each expert, or one for all; empty: 1. Errors: from AllocateWeights.
Result<QuantizedWeights> PackGgufRows(const GgufRows& rows, const GgufStored& stored,
                                      const WeightsSpec& spec,
                                      const std::vector<float>& global_scale, ThreadPool& pool);

}  // namespace marlin
