// The operations of a decoder beside the products: embedding lookup, norms, RoPE, attention, gates.
//
// All of them read and write f32, bf16 or f16, compute in fp32, run on the threads of the device,
// allocate nothing that outlives the call, and give the same bits for any number of threads. A
// row's result does not depend on the other rows (attention: see AttentionOptions). An output may
// be an input where that is said; it shares no element with any other.
//
// Every view is of the device's memory, ids and positions too: they are contiguous i32 or i64, and
// an operation on a GPU reads them when its turn on the stream comes, so that a captured step can
// be replayed with others. `stream` is that of GemmOptions: a call may return before its work is
// done. Errors: kInvalidArgument naming the argument and both shapes; for ids and positions out of
// range from the call itself where the device's memory is the host's, else from
// Device::Synchronize; kUnsupported from a device that lacks the operation.
#pragma once

#include <cstdint>
#include <span>

#include "marlin/device.h"
#include "marlin/gemm.h"
#include "marlin/status.h"
#include "marlin/tensor.h"
#include "marlin/weights.h"

#pragma GCC visibility push(default)
namespace marlin {

/// out[t, :] = table[ids[t], :]. table is [vocab, hidden], rows at any stride; ids is [tokens] and
/// out [tokens, hidden].
Status LookUpRows(const Device& device, const TensorView& table, const TensorView& ids,
                  const MutableTensorView& out, void* stream = nullptr);

/// LookUpRows for a table prepared as weights [k = hidden, n = vocab], one matrix.
Status LookUpRows(const Device& device, const PreparedWeights& table, const TensorView& ids,
                  const MutableTensorView& out, void* stream = nullptr);

/// Both for ids in the host's memory, which are checked, and copied to the device, first.
Status LookUpRows(const Device& device, const TensorView& table, std::span<const int32_t> ids,
                  const MutableTensorView& out, void* stream = nullptr);
Status LookUpRows(const Device& device, const PreparedWeights& table, std::span<const int32_t> ids,
                  const MutableTensorView& out, void* stream = nullptr);

/// out = x, rounded once where out's type is shorter. Rank 2 or 3, contiguous last dimension.
Status Convert(const Device& device, const TensorView& x, const MutableTensorView& out,
               void* stream = nullptr);

/// out = x / sqrt(mean(x^2) + epsilon) * weight over the last dimension. x and out have rank 2 or 3
/// and a contiguous last dimension; out may be x. weight is [last dimension].
Status RmsNorm(const Device& device, const TensorView& x, const TensorView& weight, float epsilon,
               const MutableTensorView& out, void* stream = nullptr);

/// x += y, element by element; rank 2, contiguous last dimension. `scale` multiplies y first.
Status AddTo(const Device& device, const TensorView& y, const MutableTensorView& x,
             float scale = 1.0F, void* stream = nullptr);

/// How a feature pair turns with its position.
struct RotaryEmbedding {
  /// f32 [pairs]: angle per position of pair i. The first 2 * pairs features of a head turn, the
  /// others pass unchanged.
  TensorView inverse_frequencies;
  float attention_factor = 1.0F;  ///< Multiplies the turned features (yarn).
  bool interleaved = false;       ///< Pairs are (2i, 2i + 1) instead of (i, i + pairs).
};

/// RoPE of x [tokens, heads, head_dim] in place; token t is at positions[t], 0 to 2^31 - 1.
Status ApplyRotary(const Device& device, const RotaryEmbedding& rotary, const TensorView& positions,
                   const MutableTensorView& x, void* stream = nullptr);

/// The same for positions in the host's memory, which are checked, and copied to the device, first.
Status ApplyRotary(const Device& device, const RotaryEmbedding& rotary,
                   std::span<const int32_t> positions, const MutableTensorView& x,
                   void* stream = nullptr);

/// One sequence's part of an attention call. The last dimension of every view is contiguous.
struct AttentionInput {
  TensorView queries;     ///< [tokens, heads, head_dim]: the last `tokens` positions of `length`.
  TensorView keys;        ///< [length, kv_heads, head_dim]; heads is a multiple of kv_heads.
  TensorView values;      ///< [length, kv_heads, value_dim].
  MutableTensorView out;  ///< [tokens, heads, value_dim].
};

struct AttentionOptions {
  float scale = 0.0F;     ///< Multiplies q.k; 0 means 1 / sqrt(head_dim).
  int64_t window = 0;     ///< Each query sees itself and the window - 1 keys before it; 0: all.
  TensorView sinks = {};  ///< f32 [heads]: a logit that takes part in the softmax without a value.
  /// As for products: kDefault lets a matrix unit multiply bf16 keys and values with queries and
  /// weights of two bf16 terms when more than four tokens come at once; otherwise fp32.
  Accuracy accuracy = Accuracy::kDefault;
  /// kBatchInvariant: a row's bits do not depend on how many tokens come at once. Never uses
  /// bf16 terms.
  Determinism determinism = Determinism::kDefault;
};

/// Causal softmax attention, sequence by sequence, with grouped heads: query head h reads key head
/// h / (heads / kv_heads). The work of all inputs runs as one parallel loop. A key that a query
/// does not see does not reach its result, not even as NaN. out may be queries.
Status Attention(const Device& device, std::span<const AttentionInput> inputs,
                 const AttentionOptions& options = {}, void* stream = nullptr);

/// Keys and values of many sequences in pages of one size. A page holds page_tokens consecutive
/// positions of one sequence: keys [kv_heads, page_tokens, key_dim] and behind them values
/// [kv_heads, page_tokens, value_dim], both without gaps. Pages lie in slabs: page p is number
/// p % slab_pages of slab p / slab_pages. A cache that never grows is one slab, whose address a
/// captured step may keep.
struct PagedCache {
  std::span<void* const> slabs;  ///< Device addresses; null: a slab that is not there.
  int64_t slab_pages = 1;
  int64_t page_stride = 0;    ///< Elements from one page of a slab to the next.
  int64_t first_element = 0;  ///< Of a slab's first page: pages may hold those of several layers.
  DType type = DType::kF32;   ///< f32, bf16 or f16.
  int64_t page_tokens = 0;    ///< A multiple of CachePageTokens.
  int64_t kv_heads = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  /// The values are the first value_dim features of the keys and have no memory of their own: the
  /// latent of MLA, with one key head.
  bool values_in_keys = false;
};

/// Which rows of a step are tokens of which sequence, and where those sequences have their pages.
/// All of it is in the device's memory: i32, contiguous.
struct SequenceRows {
  TensorView positions;   ///< [rows]: a row's place in its sequence; consecutive in a sequence.
  TensorView first_rows;  ///< [sequences + 1]: rows [first_rows[s], first_rows[s + 1]) are of s.
  /// [sequences, blocks]: the page of positions [b * page_tokens, (b + 1) * page_tokens); any
  /// number where no row of the call writes or looks.
  TensorView block_tables;
};

/// Positions that a page of this device's caches has, or has a multiple of. Errors: kUnsupported.
Result<int64_t> CachePageTokens(const Device& device);

/// Writes keys [rows, kv_heads, key_dim] and values [rows, kv_heads, value_dim] (empty where they
/// are in the keys) to the pages of their positions, rounded once where the cache's type is
/// shorter. Errors: also kInvalidArgument for first_rows that do not ascend from 0 to rows,
/// positions that are not consecutive, and pages that are not there; from Synchronize, as for ids.
Status AppendToCache(const Device& device, const TensorView& keys, const TensorView& values,
                     const SequenceRows& rows, const PagedCache& cache, void* stream = nullptr);

/// Attention of queries [rows, heads, key_dim] with the keys of their sequences up to their own
/// positions; out is [rows, heads, value_dim], or the queries. The bits are those of Attention with
/// the same keys and values outside of pages. Errors: those of AppendToCache.
Status PagedAttention(const Device& device, const TensorView& queries, const SequenceRows& rows,
                      const PagedCache& cache, const MutableTensorView& out,
                      const AttentionOptions& options = {}, void* stream = nullptr);

/// The gate of a gated MLP.
struct GateOptions {
  Activation activation = Activation::kSilu;
  /// gpt-oss: gate = min(gate, limit), up = clamp(up, -limit, limit),
  /// out = (up + 1) * gate * sigmoid(alpha * gate). 0 turns it off.
  float limit = 0.0F;
  float alpha = 1.702F;
};

/// out = activation(gate) * up, all [tokens, n] with contiguous columns; out may be gate or up.
Status ApplyGate(const Device& device, const TensorView& gate, const TensorView& up,
                 const MutableTensorView& out, const GateOptions& options = {},
                 void* stream = nullptr);

/// x = 1 / (1 + e^-x), element by element; f32 [rows, columns] with contiguous columns.
Status ApplySigmoid(const Device& device, const MutableTensorView& x, void* stream = nullptr);

}  // namespace marlin
#pragma GCC visibility pop
