// Passes that expand the latents of MLA to keys and values of heads, instead of attending to the
// latents: fewer products for prompts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/tensor.h"
#include "model/decoder_config.h"
#include "model/mixer.h"

namespace marlin {

/// The element type of heads that are expanded from a cache.
inline DType ExpandedType(DType cache_type) {
  return cache_type == DType::kF32 ? DType::kF32 : DType::kBf16;
}

/// The bytes for the expanded heads of some tokens, with `token_bytes` for all heads of a layer, up
/// to a limit. 0 without heads.
int64_t ExpandedBytes(int64_t token_bytes, int64_t tokens, bool host_memory);

/// The memory in which a pass expands latents. A pass expands as many heads at a time as fit.
class ExpandedMemory {
 public:
  ExpandedMemory(const DecoderConfig& config, DType cache_type, Accuracy accuracy,
                 bool host_memory);

  /// The element type of expanded keys and values.
  DType type() const { return type_; }
  /// Bytes, the same for all passes of a model: enough for one sequence of the model's context, up
  /// to a limit.
  int64_t bytes() const { return bytes_; }
  /// Heads that a pass expands at a time, with `count` pages of `page_tokens`; 0: not even one
  /// fits.
  int64_t HeadsAtATime(int64_t count, int64_t page_tokens) const;

 private:
  int64_t heads_;
  int64_t token_bytes_;  ///< For one head.
  DType type_;
  int64_t bytes_;
};

/// Whether a pass of some sequences expands latents. Expanding costs a product with kv_b for every
/// visible key, and saves most of the products for every pair of a query and a key. Batch-invariant
/// mode never does: a row's bits would depend on the rows that it came with. Nor does a device
/// without the operation.
bool ExpandsLatents(const Device& device, const DecoderConfig& config,
                    std::span<const PassSequence> sequences, Determinism determinism);

/// Whether the device has the operation that expands latents.
bool HasExpandLatents(const Device& device);

/// The pages of a pass's sequences; a block without a page is not expanded. `block_tables`:
/// [sequences, blocks], as in SequenceRows.
ExpandedTables TablesOf(std::span<const PassSequence> sequences,
                        std::span<const int32_t> block_tables, int64_t page_tokens);

}  // namespace marlin
