// Packing of codes, conversions between packed layouts, and shards of weights.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "marlin/format.h"
#include "marlin/status.h"
#include "marlin/tensor.h"
#include "marlin/weights.h"

#pragma GCC visibility push(default)
namespace marlin {

/// Packs codes [k, n] (one byte each, C order) into k-packed words [WordsAlongK, n].
/// Errors: kInvalidArgument for wrong sizes or a code that does not fit.
Status PackCodes(Format format, int64_t k, int64_t n, std::span<const uint8_t> codes,
                 std::span<uint32_t> words);

/// The inverse of PackCodes.
Status UnpackCodes(Format format, int64_t k, int64_t n, std::span<const uint32_t> words,
                   std::span<uint8_t> codes);

/// Size in uint32 words of a 4-bit matrix in the marlin_w4 layout, K and N padded to multiples of
/// 32; INT64_MAX for negative sizes and on overflow.
int64_t MarlinW4WordCount(int64_t k, int64_t n);

/// Converts k-packed 4-bit words [ceil(k/8), n] to marlin_w4 [K/32][N/32][32 lanes][4 words],
/// padded with code 0, and back. Errors: kInvalidArgument for wrong sizes.
Status RepackToMarlinW4(int64_t k, int64_t n, std::span<const uint32_t> canonical,
                        std::span<uint32_t> tiles);
Status RepackFromMarlinW4(int64_t k, int64_t n, std::span<const uint32_t> tiles,
                          std::span<uint32_t> canonical);

/// Converts the layouts of the original Marlin (IST-DASLab) and of vLLM's 4-bit gptq_marlin, both
/// int32 [k/16, n*2], to k-packed words. Errors: kInvalidArgument unless k % 16 == 0 and n % 64 ==
/// 0 (the granularity of both layouts).
Status RepackFromOriginalMarlin(int64_t k, int64_t n, std::span<const uint32_t> words,
                                std::span<uint32_t> canonical);
Status RepackFromVllmMarlin(int64_t k, int64_t n, std::span<const uint32_t> words,
                            std::span<uint32_t> canonical);

/// Stacked matrices whose words are stored by output feature, u32 [experts, n, WordsAlongK], as
/// weights: the words are transposed, everything else is as in QuantizedWeights. scales
/// [experts, groups, n]; zeros the same or empty. spec says everything but the shapes of experts, k
/// and n, which it must have, too. Copies. Errors: as Validate; kInvalidArgument for words of
/// another type or shape.
Result<QuantizedWeights> FromOutputMajor(const WeightsSpec& spec, const TensorView& words,
                                         const TensorView& scales, const TensorView& zeros = {});

/// A 4-bit matrix with 2:4 sparsity; K is padded to a multiple of 32 (Kp).
struct Sparse24 {
  int64_t k = 0;  ///< Unpadded.
  int64_t n = 0;
  std::vector<uint32_t> values;  ///< [Kp/16, n]: 8 kept codes a word, two per block of 4, K order.
  std::vector<uint32_t> metadata;  ///< [Kp/32, n]: 8 nibbles a word, nibble = pos1 << 2 | pos0.
};

/// Prunes to 2:4: keeps the two codes of largest decoded magnitude, or of largest `saliency` [k, n]
/// if given, in every block of four along K; ties go to the lower index. Errors: kInvalidArgument
/// for wrong sizes or a format that is not 4-bit.
Result<Sparse24> PackSparse24(Format format, int64_t k, int64_t n,
                              std::span<const uint32_t> canonical,
                              std::span<const float> saliency = {});

/// Writes k-packed words; pruned positions get the code of value 0.
/// Errors: kMalformedFile naming the first invalid nibble (valid: 4, 8, 9, 12, 13, 14),
/// kUnsupported for a format without a code of value 0.
Status UnpackSparse24(Format format, const Sparse24& sparse, std::span<uint32_t> canonical);

/// The weights with 2:4 sparsity, Sparsity::k24: in every block of four along k the two codes of
/// largest decoded magnitude are kept, or with `importance` [k], numbers of at least 0, the two of
/// largest importance * value^2; ties go to the lower k. Scales do not change. Copies; weights that
/// are 2:4 already are returned as they are. Thread-safe. Errors: as Validate;
/// kInvalidArgument for a format of other than 4 or 8 bits and for wrong importances; kUnsupported
/// for weights with zeros or biases and for values without a 0; kOutOfMemory.
Result<QuantizedWeights> Prune24(const QuantizedWeights& weights,
                                 std::span<const float> importance = {});

/// The inverse: dense weights of the same numbers, with the code of value 0 where 2:4 has none.
/// Dense weights are returned as they are. Thread-safe. Errors: as Validate, kOutOfMemory.
Result<QuantizedWeights> Expand24(const QuantizedWeights& weights);

/// The dimension of W [k, n] along which shards are cut.
enum class ShardAxis : uint8_t {
  kK,  ///< Input features: the results of the shards are added (row parallel).
  kN,  ///< Output features: the results of the shards are concatenated (column parallel).
};

/// Shard `rank` of `world` equal shards of every matrix, with exactly the weights of that part.
/// Copies, except that world == 1 shares the data. Borders along k lie between groups; weights with
/// one group for all of k are cut anywhere, each shard with the same scales; 2:4 weights along k at
/// multiples of 32. Thread-safe. Errors:
/// kInvalidArgument with both numbers for an invalid rank, or a dimension that cannot be cut so;
/// kUnsupported for weights with a permutation along k or Hadamard blocks that the border cuts;
/// as Validate; kOutOfMemory.
Result<QuantizedWeights> Shard(const QuantizedWeights& weights, ShardAxis axis, int64_t rank,
                               int64_t world);

}  // namespace marlin
#pragma GCC visibility pop
